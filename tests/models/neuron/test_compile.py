"""The subcommand `compile`: what it writes, what it rejects, and what it leaves behind when it does not come to an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_neuron import DEVICE, LLAMA, checkpoint, compiled, device, fail, machine, subcommand  # noqa: F401
from processes import wait_until

from run import HERE


def words(folder, output, *more):
    return ["--model-id", str(folder), "--output", str(output), "--tp-degree", "1", *more]


def test_a_model_is_compiled_without_a_device_and_linked_to_the_weights_of_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    fail(monkeypatch, "to_neuron", RuntimeError("there is no device"))
    output = compiled(tmp_path)
    assert list((output / "compiled").glob("*.neff"))
    assert (output / "checkpoint" / "model.safetensors").samefile(tmp_path / "model" / "model.safetensors")
    assert {path.name for path in output.iterdir()} >= {"config.json", "tokenizer.json", "compiled"}


@pytest.mark.parametrize("form", ["pytorch_model.bin", "split"])
def test_a_compiled_model_takes_along_weights_of_older_forms(tmp_path, form):
    folder = checkpoint(tmp_path / "model")
    weights = folder / "pytorch_model.bin" / "p0.weight" if form == "split" else folder / "pytorch_model.bin"
    weights.parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(weights)
    (folder / "other").mkdir()
    if form == "split":
        (weights.parent / "key_to_filename.json").write_text("{}")
    output = tmp_path / "compiled"
    assert subcommand.main(words(folder, output)) == 0
    assert (output / "checkpoint" / weights.relative_to(folder)).samefile(weights)
    assert not list(output.rglob("other"))


def test_mistrals_own_copy_of_the_weights_and_what_is_no_part_of_a_chat_stay_behind(tmp_path):
    folder = checkpoint(tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"x" * 100)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    output = tmp_path / "compiled"
    assert subcommand.main(words(folder, output)) == 0
    assert not list(output.rglob("consolidated*"))
    assert (output / "additional_chat_templates" / "tool_use.jinja").read_text() == "t"


def test_a_checkpoint_that_was_made_of_a_hub_model_is_taken_along(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "model")
    monkeypatch.setattr(subcommand, "fetch_source", lambda config, engine: (config, folder, "the commit of its source"))
    output = tmp_path / "compiled"
    assert subcommand.main(words("someone/model:file.gguf", output)) == 0
    assert (output / "checkpoint" / "model.safetensors").samefile(folder / "model.safetensors")
    assert json.loads((output / "config.json").read_text())["neuron"]["checkpoint_id"] is None


def test_help_names_the_flags_that_decide_what_is_compiled(capsys):
    with pytest.raises(SystemExit) as ended:
        subcommand.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(flag in printed for flag in ("--output", "--tp-degree", "--position-buckets"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--model-id {model}", "--output is missing"),
        ("--model-id {model} --output", "argument --output: expected one argument"),
        ("--model-id {model} --output {model}", "exists and is not empty"),
        ("--model-id {model} --output {long}", "cannot be written: [Errno 36] File name too long"),
        ("--model-id {model} --output={output}", "this machine has no Neuron device whose cores could be counted"),
        ("--model-id {model} --output {output} --device cpu", "--device cpu: only models for Neuron"),
        ("--model-id {model} --output {output} --tp-degree 3", "tp_degree 3 is not possible with 3 cores"),
        ("--model-id {model} --output {output} --tp-degree 2 --quantize int4", "give int8 or none"),
        (
            "--model-id {model} --output {output} --tp-degree 2 --kv-cache-dtype u8",
            "is not supported on Neuron; give auto or fp8",
        ),
        (
            "--model-id {model} --output {output} --tp-degree 2 --lora-adapters a={model}",
            "--lora-adapters (LORA_ADAPTERS): LoRA adapters by request are for CPUs and GPUs; on Neuron --merge-lora",
        ),
        (
            "--model-id {ranker} --output {output} --tp-degree 2",
            "LlamaForSequenceClassification (architectures in config.json)",
        ),
        ("--model-id {model} --output {output} --max-batch 3", "unknown argument '--max-batch'"),
        ("--model-id {compiled} --output {output} --tp-degree 2", "is compiled already"),
    ],
)
def test_what_compile_cannot_do_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, line, reason):
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    places = {"model": checkpoint(tmp_path / "model"), "output": tmp_path / "output", "compiled": tmp_path / "compiled"}
    places["long"] = tmp_path / ("x" * 256)
    places["ranker"] = checkpoint(tmp_path / "ranker", LLAMA | {"architectures": ["LlamaForSequenceClassification"]})
    if "{compiled}" in line:
        compiled(tmp_path)
        capsys.readouterr()
    assert subcommand.main(line.format(**places).split()) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert reason in printed
    assert not places["output"].exists()


def test_an_output_that_cannot_be_replaced_is_refused_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    for name in ("link", "empty"):
        assert subcommand.main(words(checkpoint(tmp_path / "model"), tmp_path / name)) == 2
        assert f"{name} is a symbolic link or a mount point; name a folder in it" in capsys.readouterr().err
    assert not device.compiled


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    fail(monkeypatch, "cpu_compile", RuntimeError("A process in the process pool was terminated abruptly"))
    assert subcommand.main(words(checkpoint(tmp_path / "model"), tmp_path / "deep" / "output")) == 2
    assert "the compiler ran out of host memory" in capsys.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "deep").iterdir()) == []


HANGS = """
import sys, threading, transformers_neuronx
transformers_neuronx.LlamaForSampling.cpu_compile = lambda model: threading.Event().wait()
from models.neuron.compile import main
main(sys.argv[1:])
"""


def test_what_a_killed_compile_left_is_removed_by_the_next(tmp_path):
    line = words(checkpoint(tmp_path / "model"), tmp_path / "deep" / "output")
    environment = os.environ | {"PYTHONPATH": ":".join(DEVICE)}
    process = subprocess.Popen([sys.executable, "-c", HANGS, *line], cwd=HERE, env=environment)
    wait_until(lambda: list((tmp_path / "deep").glob(".neuron-textgen-*.new")), "the compile to start")
    process.kill()
    process.wait()
    assert subcommand.main(line) == 0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["output"]
