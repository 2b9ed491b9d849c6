from transformers_neuronx.models import GPTJForSampling

__all__ = ["GPTJForSampling"]
