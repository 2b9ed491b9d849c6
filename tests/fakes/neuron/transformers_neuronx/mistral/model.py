from transformers_neuronx.models import MistralForSampling

__all__ = ["MistralForSampling"]
