from transformers_neuronx.models import MixtralForSampling

__all__ = ["MixtralForSampling"]
