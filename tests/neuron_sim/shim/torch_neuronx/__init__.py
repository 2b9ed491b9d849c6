"""CPU stand-in for the accelerator's torch extension (see neuron_sim/README.md)."""

from torch_neuronx import _runtime

_runtime.register()
