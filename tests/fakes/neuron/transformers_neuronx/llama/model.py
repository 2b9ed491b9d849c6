from transformers_neuronx.models import LlamaForSampling

__all__ = ["LlamaForSampling"]
