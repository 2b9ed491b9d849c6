"""Models that read images, on the real library: transformers' text, whatever else is in the batch, with the programs of a
text model."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from loop import Driven
from safetensors.torch import load_file, save_file
from test_server import as_float32, cores, refuse_to_compile, serve  # noqa: F401
from transformers_neuronx import compiler

from models.adapters import common_name
from models.base import Chunk
from protocol import Generate, Image, SubmitRequests
from run import HERE, ConfigError

PYTHON = os.environ.get("SERVER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SERVER_PYTHON names no interpreter with transformers 5")

FAMILIES = ["llava", "llava_next", "granite_vision", "llava_onevision", "smolvlm", "idefics3", "pixtral", "mistral3"]
FAMILIES += ["internvl"]
POSITIONS = 2048
TEXT = [1, 260, 40, 41, 290, 70, 81, 92]
SETTINGS = {
    "whole": {"prefill_chunk": 0, "sampling": "host"},
    "chunks": {"prefill_chunk": 128, "sampling": "host", "speculate": 3},
    "hybrid": {"prefill_chunk": 128},
}


class Reference(NamedTuple):
    folder: str
    image: Image
    prompt: list[int]
    text: list[int]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visions")
    script = HERE / "tests/neuron_sim/vision_references.py"
    subprocess.run([PYTHON, "-I", script, folder, *FAMILIES], check=True, timeout=600)
    read = msgspec.msgpack.Decoder(Reference).decode
    return {family: read((folder / f"{family}.reference").read_bytes()) for family in FAMILIES}


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
    assert (driven.prompts[5].cached > 0) == bool(model.prefill_chunk and len(reference.prompt) > model.prefill_chunk + 1)


def test_the_compiled_graphs_of_the_text_model_serve_it(references, tmp_path, monkeypatch):
    reference = references["llava"]
    settings = SETTINGS["chunks"]
    config = json.loads(Path(reference.folder, "config.json").read_text())
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config["text_config"] | {"architectures": ["LlamaForCausalLM"]}))
    tensors = load_file(Path(reference.folder, "model.safetensors"))
    by_name = {common_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    of_text = ("layers.", "norm.", "embed_tokens.")
    text = {f"model.{name}": tensor for name, tensor in by_name.items() if name.startswith(of_text)}
    text["lm_head.weight"] = by_name["lm_head.weight"]
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    served(reference._replace(folder=folder), tmp_path, **settings)
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    driven = Driven(served=served(reference, tmp_path, **settings))
    driven.arrive(asks(1, reference))
    driven.run()
    assert driven.tokens[1] == reference.text


@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_the_head_is_that_of_the_checkpoint_whatever_its_two_configs_say_of_ties(references, tmp_path, family):
    reference = references[family]
    folder = shutil.copytree(reference.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True  # and there is a head
    (folder / "config.json").write_text(json.dumps(config))
    driven = Driven(served=served(reference._replace(folder=folder), tmp_path, **SETTINGS["whole"]))
    driven.arrive(asks(1, reference))
    driven.run()
    assert driven.tokens[1] == reference.text


def test_embeddings_that_the_device_looks_up_are_refused_by_name(references, tmp_path):
    named = r"--neuron-config on_device_embedding=true \(NEURON_CONFIG\) is not supported for models that read images"
    with pytest.raises(ConfigError, match=named):
        served(references["llava"], tmp_path, neuron_config=("on_device_embedding=true",))


def test_an_image_of_an_idle_slot_keeps_its_embeddings(references, tmp_path):
    """Its tokens run again where a step of the others needs the whole batch."""
    reference = references["pixtral"]
    model = served(reference, tmp_path, **SETTINGS["chunks"])
    driven = Driven(served=model)
    driven.arrive(asks(1, reference))
    driven.run()
    driven.worker._preparation.start()  # which frees what ended requests held
    cache = model.encoder_cache
    cache.limit_bytes = 0
    cache.add(7, np.zeros((1, cache.width), np.float32))
    assert reference.image.key in cache and 7 not in cache
    driven.arrive(Generate(2, TEXT * 8, 30, ignore_eos=True, logprobs=False))
    driven.run()
    assert driven.ends[2] == "length"
    for slot in range(3):
        driven.arrive(Generate(10 + slot, [5 + slot, *TEXT], 3, ignore_eos=True, logprobs=False))
    driven.run()
    cache.pin("requests", set())
    assert reference.image.key not in cache


def test_int8_runs_and_comes_close(references, tmp_path):
    reference = references["smolvlm"]
    rows = []
    for quantize in (None, "int8"):
        model = served(reference, tmp_path, prefill_chunk=0, sampling="host", quantize=quantize)
        pixels = np.frombuffer(reference.image.pixels, np.uint8).reshape(*reference.image.shape, 3)
        model.encoder_cache.add(reference.image.key, model.vision.encode(pixels, reference.image.canvas, lambda: False))
        rows.append(as_float32(model.forward([Chunk(0, reference.prompt, 0)]))[0])
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.1 * np.ptp(rows[0])
