from transformers_neuronx.models import GPT2ForSampling, GPT2ForSamplingWithContextBroadcasting

__all__ = ["GPT2ForSampling", "GPT2ForSamplingWithContextBroadcasting"]
