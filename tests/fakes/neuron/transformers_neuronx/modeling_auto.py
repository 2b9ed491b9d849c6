"""Finds the class for a checkpoint."""

from transformers_neuronx import models

CLASSES = {
    "bloom": models.BloomForSampling,
    "code_llama": models.LlamaForSampling,
    "gpt2": models.GPT2ForSamplingWithContextBroadcasting,
    "gpt_neox": models.GPTNeoXForSampling,
    "gptj": models.GPTJForSampling,
    "llama": models.LlamaForSampling,
    "mistral": models.MistralForSampling,
    "mixtral": models.MixtralForSampling,
    "opt": models.OPTForSampling,
}


class NeuronAutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        model_type = models.read_config(pretrained_model_name_or_path).model_type
        if model_type not in CLASSES:
            raise AssertionError(f"The model type {model_type!r} is not supported by Neuron")
        return CLASSES[model_type].from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
