"""Compiles HLO modules for the CPU and runs them, one XLA replica per simulated core."""

import functools
import os
import threading

import numpy as np

from torch_neuronx import _lowering
from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2
from torch_neuronx.pyhlo.scribe import numpy_dtype

MAX_CORES = int(os.environ.get("NEURON_SIM_CORES", "8"))

_lock = threading.Lock()


def _jax():
    """Imported late: the library forks its compile workers before anything is loaded."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={MAX_CORES}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax


class Program:
    """A module compiled for `replicas` cores."""

    def __init__(self, module_bytes, replicas):
        jax = _jax()
        from jaxlib import _jax as low_level
        from jaxlib import xla_client

        module = hlo_pb2.HloModuleProto()
        module.ParseFromString(module_bytes)
        self.name = module.name
        self.parameters = [_array_spec(shape) for shape in module.host_program_shape.parameters]
        result = module.host_program_shape.result
        outputs = result.tuple_shapes if result.element_type == xla_data_pb2.TUPLE else [result]
        self.results = [_array_spec(shape) for shape in outputs]
        self.devices = jax.devices("cpu")[:replicas]
        if len(self.devices) < replicas:
            raise RuntimeError(f"{replicas} cores requested, {len(self.devices)} simulated (set NEURON_SIM_CORES)")
        options = xla_client.CompileOptions()
        options.num_replicas = replicas
        options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[device.id] for device in self.devices], dtype=np.int32)
        )
        build = options.executable_build_options
        build.num_replicas = replicas
        build.num_partitions = 1
        stablehlo = low_level.mlir.hlo_to_stablehlo(_lowering.lower(module_bytes))
        client = self.devices[0].client
        self.executable = client.compile_and_load(stablehlo, xla_client.DeviceList(tuple(self.devices)), options)
        mesh = jax.sharding.Mesh(np.array(self.devices), ("core",))
        self._stacked = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("core"))
        self._jax = jax

    def run(self, shards_by_parameter):
        """`shards_by_parameter[i][core]` are NumPy arrays; results likewise."""
        jax = self._jax
        arguments = []
        for shards in shards_by_parameter:
            pieces = [jax.device_put(shard, device) for shard, device in zip(shards, self.devices)]
            arguments.append(self._join(pieces))
        outputs = self.executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [[np.asarray(piece) for piece in pieces] for pieces in outputs]

    def _join(self, pieces):
        if len(pieces) == 1:
            return pieces[0]
        jax = self._jax
        shape = pieces[0].shape
        if not shape:  # a scalar has no axis to lay the cores along
            sharding = jax.sharding.NamedSharding(self._stacked.mesh, jax.sharding.PartitionSpec())
            return jax.make_array_from_single_device_arrays((), sharding, pieces)
        return jax.make_array_from_single_device_arrays((shape[0] * len(pieces), *shape[1:]), self._stacked, pieces)


def _array_spec(shape):
    return tuple(shape.dimensions), numpy_dtype(shape.element_type)


def load(module_bytes, replicas):
    with _lock:
        return _loaded(module_bytes, replicas)


# Not all of a run: each takes mappings of memory, of which a process may have 65,530.
@functools.lru_cache(maxsize=100)
def _loaded(module_bytes, replicas):
    return Program(module_bytes, replicas)
