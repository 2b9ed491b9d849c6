"""Models that read images, on the real library: transformers' text, whatever else is in the batch, with the programs of a
text model."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from loop import Driven
from test_server import as_float32, cores, refuse_to_compile, serve  # noqa: F401

from models.base import Chunk
from protocol import Generate, Image, SubmitRequests
from run import HERE

PYTHON = os.environ.get("SERVER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SERVER_PYTHON names no interpreter with transformers 5")

FAMILIES = [
    "llava",
    "llava_next",
    "granite_vision",
    "llava_onevision",
    "smolvlm",
    "idefics3",
    "pixtral",
    "mistral3",
    "internvl",
]
POSITIONS = 2048
TEXT = [1, 260, 40, 41, 290, 70, 81, 92]
SETTINGS = {
    "whole": {"prefill_chunk": 0, "sampling": "host"},
    "chunks": {"prefill_chunk": 128, "sampling": "host", "speculate": 3},
    "hybrid": {"prefill_chunk": 128},
}


class Reference(NamedTuple):
    folder: Path
    image: Image
    prompt: list[int]
    text: list[int]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visions")
    script = HERE / "tests/neuron_sim/vision_references.py"
    subprocess.run([PYTHON, "-I", script, folder, *FAMILIES], check=True, timeout=600)
    read = msgspec.msgpack.Decoder(tuple[Image, list[int], list[int]]).decode
    return {family: Reference(folder / family, *read((folder / f"{family}.reference").read_bytes())) for family in FAMILIES}


def served(reference, tmp_path, **settings):
    sizes = {"max_total_tokens": POSITIONS, "max_input_tokens": POSITIONS - 20, "max_batch_size": 3}
    buckets = {"prefill_buckets": (POSITIONS,), "position_buckets": (POSITIONS,)}
    return serve(None, tmp_path, reference.folder, **sizes, **buckets, **settings)


def asks(number, reference, **options):
    options = {"ignore_eos": True, "logprobs": False} | options
    return SubmitRequests([Generate(number, reference.prompt, len(reference.text), **options)], [reference.image])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_transformers_alone_beside_others_and_again(references, tmp_path, family, settings):
    reference = references[family]
    model = served(reference, tmp_path, **settings)
    driven = Driven(served=model)
    text = {"ignore_eos": True, "logprobs": False}
    driven.arrive(Generate(1, TEXT, 12, **text))
    driven.run()
    driven.arrive(Generate(2, TEXT, 12, **text))
    driven.step(3)
    driven.arrive(asks(3, reference), asks(4, reference, logprobs=True))
    driven.run()
    driven.arrive(asks(5, reference))
    driven.run()
    assert driven.tokens[1] == driven.tokens[2]
    assert [driven.tokens[i] for i in (3, 4, 5)] == [reference.text] * 3
    assert (driven.prompts[5].cached > 0) == bool(model.prefill_chunk)


def test_int8_runs_and_comes_close(references, tmp_path):
    reference = references["smolvlm"]
    rows = []
    for quantize in (None, "int8"):
        model = served(reference, tmp_path, prefill_chunk=0, sampling="host", quantize=quantize)
        pixels = np.frombuffer(reference.image.pixels, np.uint8).reshape(*reference.image.shape, 3)
        model.encoder_cache.add(reference.image.key, model.encode_image(pixels, reference.image.canvas, lambda: False))
        rows.append(as_float32(model.forward([Chunk(0, reference.prompt, 0)]))[0])
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.1 * np.ptp(rows[0])
