"""Device tensors, programs and the operators which the library calls."""

import collections

import numpy as np
import torch

Execution = collections.namedtuple("Execution", "module parameters")
executions = collections.deque(maxlen=10_000)  # every program run, for tests


class DeviceTensor(torch.Tensor):
    """One tensor per simulated core, all of the same shape.

    Like a tensor on the accelerator, it has a shape and a dtype on the host
    but no operators; data moves by the explicit transfer functions only.
    """

    @staticmethod
    def __new__(cls, shards):
        first = shards[0]
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device="meta")

    def __init__(self, shards):
        self.shards = shards

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a device tensor; copy it to the host first")

    def __repr__(self):
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype}, cores={len(self.shards)})"

    def __reduce_ex__(self, protocol):
        raise RuntimeError("a device tensor cannot be pickled")


def _as_numpy(tensor, dtype):
    """The tensor's memory read as `dtype` (the torch side has no unsigned types, for example)."""
    if tensor.element_size() != dtype.itemsize:
        raise RuntimeError(f"{tensor.dtype} buffer where the program has {dtype}")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return tensor.detach().contiguous().view(bits).numpy().view(dtype)


def _store(tensor, array):
    bits = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize]
    torch_bits = getattr(torch, np.dtype(bits).name)
    if array.shape != tuple(tensor.shape) or array.dtype.itemsize != tensor.element_size():
        raise RuntimeError(f"program result {array.dtype}{list(array.shape)} for a buffer {tensor.dtype}{list(tensor.shape)}")
    source = torch.from_numpy(np.array(array, order="C").view(bits).reshape(array.shape))
    tensor.view(torch_bits).copy_(source)


def _parallel_to_neuron(tensors):
    shapes = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(shapes) != 1:
        raise RuntimeError(f"the cores need tensors of one shape and dtype, not {shapes}")
    with torch.inference_mode(False), torch.no_grad():
        return DeviceTensor([tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors])


def _parallel_from_neuron(tensor):
    return [shard.clone() for shard in tensor.shards]


def _parallel_write_neuron(tensor, tensors):
    if len(tensors) != len(tensor.shards):
        raise RuntimeError(f"{len(tensors)} tensors written to {len(tensor.shards)} cores")
    with torch.no_grad():
        for shard, source in zip(tensor.shards, tensors):
            if shard.shape != source.shape or shard.dtype != source.dtype:
                raise RuntimeError(
                    f"{source.dtype}{list(source.shape)} written to a device buffer {shard.dtype}{list(shard.shape)}"
                )
            shard.copy_(source)


def _parallel_slice_neuron(tensor, dim, start, end, step):
    """A window on the same device memory."""
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(start, end, step)
    return DeviceTensor([shard[tuple(index)] for shard in tensor.shards])


def _init_neuron():
    return True


class ParallelTensorSet:
    def __init__(self, names, tp_degree):
        self.names = list(names)
        self.tp_degree = tp_degree
        self.tensors = {}

    def init(self):
        self.tensors = {}

    def add(self, index, tensor):
        if not isinstance(tensor, DeviceTensor):
            raise RuntimeError(f"{type(tensor).__name__} bound to a program; a device tensor is needed")
        self.tensors[index] = tensor

    def ordered(self, count):
        missing = [index for index in range(count) if index not in self.tensors]
        if missing or len(self.tensors) != count:
            raise RuntimeError(f"{len(self.tensors)} tensors bound, {count} needed (missing {missing})")
        return [self.tensors[index] for index in range(count)]


class ParallelModel:
    def __init__(self, program_bytes, tp_degree, first_core, core_count):
        self.program_bytes = program_bytes
        self.tp_degree = tp_degree
        self.program = None

    def load(self):
        from torch_neuronx import _xla  # late, see there

        self.program = _xla.load(bytes(self.program_bytes), self.tp_degree)

    def run(self, inputs, outputs):
        if self.program is None:
            raise RuntimeError("the program is not loaded")
        parameters = inputs.ordered(len(self.program.parameters))
        results = outputs.ordered(len(self.program.results))
        arguments = []
        for number, (tensor, (shape, dtype)) in enumerate(zip(parameters, self.program.parameters)):
            if tuple(tensor.shape) != shape:
                raise RuntimeError(
                    f"{self.program.name}: parameter {number} is {dtype}{list(shape)}, "
                    f"the bound buffer is {tensor.dtype}{list(tensor.shape)}"
                )
            arguments.append([_as_numpy(shard, dtype) for shard in tensor.shards])
        executions.append(Execution(self.program.name, [shape for shape, _ in self.program.parameters]))
        computed = self.program.run(arguments)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, pieces in zip(results, computed):
                for shard, piece in zip(tensor.shards, pieces):
                    _store(shard, piece)


class ParallelExecutor:
    def __init__(self, model, all_inputs, all_outputs, user_inputs, user_outputs):
        self.model = model
        self.all_inputs = all_inputs
        self.all_outputs = all_outputs
        self.user_inputs = list(user_inputs)
        self.user_outputs = list(user_outputs)


def _parallel_run_neuron(model, inputs, outputs):
    model.run(inputs, outputs)


def _parallel_executor_run(executor, tensors, return_ranks):
    for buffer, tensor in zip(executor.user_inputs, tensors):
        _parallel_write_neuron(buffer, [tensor] * len(buffer.shards))
    executor.model.run(executor.all_inputs, executor.all_outputs)
    if return_ranks == 0:
        return []
    count = None if return_ranks < 0 else return_ranks
    return [torch.cat([shard.clone() for shard in output.shards[:count]], dim=0) for output in executor.user_outputs]


class Namespace:
    """The attributes registered below; anything else fails by name."""

    def __init__(self, title, members):
        self._title = title
        for name, member in members.items():
            setattr(self, name, member)

    def __getattr__(self, name):
        raise NotImplementedError(f"{self._title}.{name} is not simulated")


def register():
    operators = {
        function.__name__: function
        for function in (
            _init_neuron,
            _parallel_to_neuron,
            _parallel_from_neuron,
            _parallel_write_neuron,
            _parallel_slice_neuron,
            _parallel_run_neuron,
            _parallel_executor_run,
        )
    }
    classes = {kind.__name__: kind for kind in (ParallelTensorSet, ParallelModel, ParallelExecutor)}
    torch.ops.neuron = Namespace("torch.ops.neuron", operators)
    torch.classes.neuron = Namespace("torch.classes.neuron", classes)
