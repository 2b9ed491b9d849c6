from transformers_neuronx.models import OPTForSampling

__all__ = ["OPTForSampling"]
