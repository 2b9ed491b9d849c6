"""What transformers makes of a checkpoint: prompts, chats and greedy continuations, with eager attention in float32."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import made
import numpy as np
import torch
import transformers

from models.cache import digest
from published.folders import known

TOKENS = 16
CLEAR = 5e-5  # a smaller lead of the best token, as a share of the largest logit, may turn with the order of additions


class PresencePenalty(transformers.LogitsProcessor):
    """OpenAI's, which transformers does not have: of tokens that were generated before."""

    def __init__(self, penalty: float, prompt_tokens: int):
        self.penalty = penalty
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[0, input_ids[0, self.prompt_tokens :].unique()] -= self.penalty
        return scores


class Reference:
    """The tokenizer, the chat template and the model of a folder that is made once (made.py): so are its continuations."""

    def __init__(self, folder: Path):
        self.folder = folder
        # AutoTokenizer would put a family's own pre-tokenizer in the place of the file's.
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        path = folder / "tokenizer_config.json"
        written = json.loads(path.read_text()) if path.is_file() else {}
        for name in ("bos_token", "eos_token"):
            if token := written.get(name):
                setattr(self.tokenizer, name, token if isinstance(token, str) else token["content"])
        if written.get("add_bos_token") and written["tokenizer_class"].startswith("Llama"):
            self.tokenizer.add_bos_token = True
        template = folder / "chat_template.jinja"  # a base model has none
        self.tokenizer.chat_template = template.read_text() if template.is_file() else written.get("chat_template")
        self.continued = functools.cache(self._continued)

    @functools.cached_property
    def model(self) -> transformers.PreTrainedModel:
        config = known(json.loads((self.folder / "config.json").read_text()))
        reads_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
        # Eager, because the faster attention leaves Gemma 2's softcaps out.
        model = auto.from_pretrained(self.folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
        if config.model_type == "nemotron_h":  # transformers 5.20 takes the limits of another field
            for module in model.modules():
                if hasattr(module, "time_step_limit"):
                    module.time_step_limit = tuple(config.time_step_limit)
        model.generation_config = transformers.GenerationConfig()
        return model

    def ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(prompt)["input_ids"])

    def chat_ids(self, messages: list[dict]) -> tuple[int, ...]:
        return tuple(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def continued_with_image(self, messages: list[dict], picture) -> list[int]:
        """The same for a chat with one image."""
        # The transformers 4 of the simulator's tests does not have it.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(self.folder)
        images = processor(images=[picture], return_tensors="pt")
        tokens = int(images["image_grid_thw"].prod()) // processor.merge_size**2
        image_id = self.model.config.image_token_id
        ids = [[token] * tokens if token == image_id else [token] for token in self.chat_ids(messages)]
        ids = list(itertools.chain.from_iterable(ids))
        types = torch.tensor([[int(token == image_id) for token in ids]])
        return self._generate(ids, TOKENS, mm_token_type_ids=types, **images)[0]

    def _continued(self, ids, tokens=TOKENS, **penalties):
        """What transformers continues a prompt with, up to the first token that does not lead clearly, and the
        log-probabilities of every token there: float32 [tokens, vocabulary]."""
        name = digest([str(self.folder), list(ids), tokens, penalties])

        def make(folder: Path) -> None:
            found, logprobs = self._generate(ids, tokens, **penalties)
            np.savez(folder / "continued.npz", tokens=found, logprobs=logprobs)

        with np.load(made.once(f"continued/{name}", make) / "continued.npz") as kept:
            return kept["tokens"].tolist(), kept["logprobs"]

    def _generate(self, ids, tokens, repetition_penalty=1.0, presence_penalty=0.0, **images):
        ids = torch.tensor([ids])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **images,
            do_sample=False,
            use_cache=self.model.config.model_type != "nemotron_h",  # its steps differ from its own prompts
            max_new_tokens=tokens,
            repetition_penalty=repetition_penalty,
            logits_processor=[PresencePenalty(presence_penalty, ids.shape[1])],
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        scores = torch.cat(out.scores)
        best, second = scores.topk(2).values.T
        unclear = (best - second < CLEAR * scores.abs().amax(-1)).nonzero()
        clear = int(unclear[0]) if len(unclear) else tokens
        return out.sequences[0, ids.shape[1] :][:clear].tolist(), torch.log_softmax(torch.cat(out.logits)[:clear], -1).numpy()
