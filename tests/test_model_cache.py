"""The cache of converted models: what a later start needs, what makes an entry anew, and who may write to it."""

import dataclasses
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_models import edit_config, llama, save_checkpoint

import models.convert
from config import HERE, Config, ConfigError, Manifest
from models import cpu
from models.cache import ModelCache, model_key, read_entry, write_entry

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]  # of torch and openvino, while converting


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", llama())


@pytest.fixture
def conversions(monkeypatch):
    """Of this test, in this process."""
    made = []

    def convert(arguments, config):
        made.append(config.model_id)
        models.convert.convert(config, *map(Path, arguments))

    monkeypatch.setattr(cpu, "run_converter", convert)
    return made


def settings(checkpoint, tmp_path, **changes) -> Config:
    config = Config(model_id=str(checkpoint), device="cpu", model_cache=str(tmp_path / "cache"), threads=1, **changes)
    return config.with_manifest(Manifest.read(checkpoint))


def load(config: Config):
    return cpu.load(config, Path(config.model_id), Manifest.read(config.model_id), lambda phase: None)


LATER_START = """
import json, sys
from pathlib import Path
from config import Config, Manifest
from models.cpu import load
config = Config.from_json(sys.stdin.read())
model = load(config, Path(config.model_id), Manifest.read(config.model_id), lambda phase: None)
print(model.engine, "torch" in sys.modules, "transformers" in sys.modules)
"""


def test_the_first_start_converts_in_a_child_and_a_later_one_imports_neither_torch_nor_transformers(checkpoint, tmp_path):
    config = settings(checkpoint, tmp_path)
    for _start in range(2):
        command = [sys.executable, "-c", LATER_START]
        done = subprocess.run(command, input=config.to_json(), capture_output=True, text=True, cwd=HERE, check=True)
        assert done.stdout == "openvino False False\n"
    assert len(list(Path(config.model_cache).glob("model-*"))) == 1
    assert Path(config.model_cache).stat().st_mode & 0o777 == 0o700


def test_a_converted_model_is_used_again_and_a_changed_checkpoint_is_converted_anew(checkpoint, tmp_path, conversions):
    config = settings(save_checkpoint(tmp_path / "model", llama()), tmp_path)
    load(config)
    load(dataclasses.replace(config, max_batch_size=2, max_total_tokens=12, max_input_tokens=11))
    assert len(conversions) == 1
    edit_config(Path(config.model_id), rms_norm_eps=1e-3)
    load(config)
    assert len(conversions) == 2


def test_the_key_depends_on_all_that_a_conversion_reads(checkpoint, tmp_path, monkeypatch):
    config = settings(checkpoint, tmp_path)
    keys = [model_key(config, checkpoint, "float32"), model_key(config, checkpoint, "bfloat16")]
    keys.append(model_key(dataclasses.replace(config, quantize="int8"), checkpoint, "float32"))
    hub = dataclasses.replace(config, model_id="someone/llama")
    keys += [model_key(hub, Path("snapshots") / commit, "float32") for commit in ("c0ffee", "decade")]
    code = save_checkpoint(tmp_path / "code", llama())
    keys.append(model_key(dataclasses.replace(config, model_id=str(code)), edit_config(code, auto_map={}), "float32"))
    (code / "modeling.py").write_text("1")
    keys.append(model_key(dataclasses.replace(config, model_id=str(code)), code, "float32"))
    keys.append(model_key(dataclasses.replace(config, model_id=str(code), trust_remote_code=True), code, "float32"))
    monkeypatch.setattr("models.cache.version", lambda package: "another")
    keys.append(model_key(config, checkpoint, "float32"))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("damage", ["model.bin", "model.xml", "entry.json", "logits"])
def test_a_damaged_entry_is_converted_anew_with_one_warning(checkpoint, tmp_path, conversions, caplog, damage):
    config = settings(checkpoint, tmp_path)
    load(config)
    (entry,) = Path(config.model_cache).glob("model-*")
    if damage == "logits":
        facts = read_entry(entry)
        facts["reference"]["logits"][5][0] += 1
        write_entry(entry, facts)
    else:
        os.truncate(entry / damage, (entry / damage).stat().st_size // 2)
    assert load(config).engine == "openvino"
    assert len(conversions) == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "is damaged" in caplog.text and "converting again" in caplog.text


def test_a_model_that_does_not_convert_is_not_tried_again(checkpoint, tmp_path, conversions, monkeypatch, caplog):
    def fail(model):
        raise RuntimeError("Exception from somewhere:\nNo conversion rule for aten::frobnicate\n")

    monkeypatch.setattr(models.convert, "trace", fail)
    config = settings(checkpoint, tmp_path)
    assert [load(config).engine for _start in range(2)] == ["torch", "torch"]
    assert len(conversions) == 1
    assert caplog.text.count("plain PyTorch, slower: RuntimeError: No conversion rule for aten::frobnicate") == 2


def test_a_conversion_that_dies_leaves_plain_pytorch_and_no_entry(checkpoint, tmp_path, monkeypatch, caplog):
    def die(arguments, config):
        raise RuntimeError("the conversion ended with code -9")

    monkeypatch.setattr(cpu, "run_converter", die)
    config = settings(checkpoint, tmp_path)
    assert load(config).engine == "torch"
    assert "the conversion ended with code -9" in caplog.text
    assert [path.name for path in Path(config.model_cache).iterdir()] == ["lock"]


@pytest.mark.parametrize("full", [False, True], ids=["read-only", "full"])
def test_a_cache_that_cannot_be_written_costs_a_warning(checkpoint, tmp_path, conversions, monkeypatch, caplog, full):
    config = settings(checkpoint, tmp_path)
    if full:
        free = lambda path: (0, 0, 0 if "cache" in str(path) else 10**12)  # noqa: E731
        monkeypatch.setattr(models.convert, "free_bytes", lambda path: free(path)[2])
    else:
        config = dataclasses.replace(config, model_cache="/proc/no-such-folder")
    assert load(config).engine == "openvino"
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "cannot be kept" in caplog.text


def test_one_process_converts_and_the_other_waits_and_says_so(tmp_path, monkeypatch):
    cache, made, said, waits = ModelCache(tmp_path, 1.0), [], [], threading.Event()
    monkeypatch.setattr(models.cache.logger, "info", lambda message, *_: (said.append(message), waits.set()))

    def convert(folder):
        made.append(folder)
        write_entry(folder, {})

    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=cache.find_or_add, args=("model-a", convert))
        other.start()
        assert waits.wait(10)
        (tmp_path / "model-a").mkdir()
        write_entry(tmp_path / "model-a", {})
    other.join(10)
    assert made == []
    assert said[0].startswith("Another process is converting a model")


def test_a_conversion_that_was_killed_leaves_nothing_behind(tmp_path):
    (tmp_path / ".new-abandoned").mkdir()
    with pytest.raises(ZeroDivisionError):
        ModelCache(tmp_path, 1.0).find_or_add("model-a", lambda folder: 1 / 0)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_least_recently_used_entries_go_first(tmp_path):
    cache = ModelCache(tmp_path, 2500e-9)

    def convert(folder):
        (folder / "model.bin").write_bytes(bytes(1000))
        write_entry(folder, {})

    for age, key in enumerate(("model-a", "tokenizer-b", "model-c")):
        os.utime(cache.find_or_add(key, convert) / "entry.json", (age, age))
        if key == "tokenizer-b":
            cache.find("model-a")
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "model-a", "model-c"}


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--model-cache .*\(MODEL_CACHE\) can be written to by other users"):
        ModelCache(tmp_path, 1.0)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"--model-cache .*\(MODEL_CACHE\) belongs to user"):
        ModelCache(tmp_path, 1.0)
