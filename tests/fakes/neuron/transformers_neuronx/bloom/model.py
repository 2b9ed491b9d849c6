from transformers_neuronx.models import BloomForSampling

__all__ = ["BloomForSampling"]
