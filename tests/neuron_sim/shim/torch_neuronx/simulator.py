"""What tests may ask the simulator itself."""

from torch_neuronx._runtime import DeviceTensor, Execution, executions  # noqa: F401


def cache_lengths(execution):
    """The KV-cache lengths (SBH layout) among the shapes of one program run: its bucket."""
    return sorted({shape[0] for shape in execution.parameters if len(shape) == 4})
