"""The simulated device that the tests run on does with the server's calls what transformers-neuronx does with them."""

import on_neuron  # noqa: F401  puts the device in the place of the library
from neuron_contract import *  # noqa: F403
