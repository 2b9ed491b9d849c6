"""python vision_references.py FOLDER FAMILY ...: tiny checkpoints that transformers 5 makes, an image for each, and how
transformers continues a prompt with it (tests/models/images/test_towers.py)."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "helpers"), str(TESTS / "models" / "images")]

from test_towers import Zoo  # noqa: E402

from protocol import encode  # noqa: E402

root = Path(sys.argv[1])
zoo = Zoo()
for family in sys.argv[2:]:
    prompt = zoo.prompt(family)
    text, _lead, _logits = zoo.text(family)
    (root / f"{family}.reference").write_bytes(encode((str(zoo.folder(family)), zoo.picture(family).image, prompt, text)))
