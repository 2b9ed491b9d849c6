"""A strict stand-in for transformers-neuronx 0.13, with a simulated device behind it.

It takes what the library takes, answers in the same shapes and dtypes, and raises the same types of errors. Where the library
would go wrong without a word, `fake.FakeNeuronViolation` is raised. What only the fake has is in the module `fake`.
"""

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.constants import GQA, Layout
from transformers_neuronx.modeling_auto import NeuronAutoModelForCausalLM
from transformers_neuronx.models import (
    BloomForSampling,
    GPT2ForSamplingWithContextBroadcasting,
    GPTJForSampling,
    GPTNeoXForSampling,
    LlamaForSampling,
    MistralForSampling,
    MixtralForSampling,
    OPTForSampling,
)
from transformers_neuronx.version import __version__

__all__ = [
    "GQA",
    "BloomForSampling",
    "ContinuousBatchingConfig",
    "GPT2ForSamplingWithContextBroadcasting",
    "GPTJForSampling",
    "GPTNeoXForSampling",
    "GenerationConfig",
    "Layout",
    "LlamaForSampling",
    "MistralForSampling",
    "MixtralForSampling",
    "NeuronAutoModelForCausalLM",
    "NeuronConfig",
    "OPTForSampling",
    "QuantizationConfig",
    "__version__",
]
