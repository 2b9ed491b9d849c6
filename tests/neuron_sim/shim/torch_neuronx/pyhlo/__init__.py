"""Graph building: protobuf messages plus the scribe."""

from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2  # noqa: F401
