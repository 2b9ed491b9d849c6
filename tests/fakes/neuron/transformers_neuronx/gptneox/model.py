from transformers_neuronx.models import GPTNeoXForSampling

__all__ = ["GPTNeoXForSampling"]
