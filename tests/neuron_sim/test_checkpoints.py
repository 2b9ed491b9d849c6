"""Checkpoints on the real library: their forms, and values of their config.json."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from quantized import quantize, quantize_experts
from test_server import Batch, as_float32, assert_like, cores, serve  # noqa: F401
from test_simulator import ARCHITECTURES, SMALL, VOCABULARY, Reference, reference  # noqa: F401
from transformers_neuronx.layers import attention
from transformers_neuronx.module import save_pretrained_split

import models
from config import Config
from manifest import Manifest
from models.base import Chunk
from models.errors import ModelError
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel

PROMPT = [3, 100, 7, *[(5 * n) % 250 + 2 for n in range(30)]]
WINDOW = 48
GATED = SMALL | {"num_key_value_heads": 2}
FAMILIES = {
    "llama": (transformers.LlamaConfig, GATED),
    "mistral": (transformers.MistralConfig, GATED | {"sliding_window": None}),
    "mixtral": (transformers.MixtralConfig, GATED | {"num_local_experts": 4}),
    "gpt_oss": (transformers.GptOssConfig, GATED | {"head_dim": 32, "num_local_experts": 4}),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def made(family, folder, **changes):
    """A random model with these values, all its biases different from zero."""
    config_class, values = FAMILIES[family]
    found = Reference(config_class(**values | changes), folder)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    found.model.save_pretrained(folder)
    return found


def error(model, expected):
    """The largest difference of a logit from transformers', after a prompt and after a token."""
    logits = [model.forward([Chunk(0, PROMPT, 0)]), model.forward([Chunk(0, [9], len(PROMPT))])]
    texts = [PROMPT, [*PROMPT, 9]]
    return max(float((torch.from_numpy(a[0].copy()) - expected.logits(b)).abs().max()) for a, b in zip(logits, texts))


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"rope_theta": 500000.0}),
        ("mixtral", {"num_experts_per_tok": 3}),
    ],
    ids=str,
)
def test_other_values_have_the_logits_of_transformers(tmp_path, family, values):
    expected = made(family, tmp_path / "model", **values)
    assert error(serve(expected, tmp_path), expected) < 0.01


def save(expected, form):
    """The checkpoint of a reference in an older form, in place of the safetensors."""
    for path in Path(expected.folder).glob("*.safetensors"):
        path.unlink()
    if form == "split":
        save_pretrained_split(expected.model, expected.folder)
        assert (Path(expected.folder) / "pytorch_model.bin" / "key_to_filename.json").is_file()
    else:
        path = Path(expected.folder) / "pytorch_model.bin"
        torch.save(expected.model.state_dict(), path, _use_new_zipfile_serialization=form != "of PyTorch 1.5")


@pytest.mark.parametrize("form", ["split", "pytorch_model.bin", "of PyTorch 1.5"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_checkpoints_of_older_forms_are_served_and_compiled(tmp_path, form, family):
    expected = made(family, tmp_path / "model")
    save(expected, form)
    assert error(serve(expected, tmp_path), expected) < 0.01
    output = tmp_path / "compiled"
    words = ["--model-id", str(expected.folder), "--output", str(output), "--tp-degree", "1", "--dtype", "float32"]
    assert verb.main([*words, "--max-total-tokens", str(WINDOW), "--max-batch-size", "1"]) == 0
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    assert error(NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path))), expected) < 0.01


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "gptq with g_idx"), ("llama", "fp8 in blocks"), ("mixtral", "awq"), ("gpt_oss", "mxfp4")],
)
def test_a_quantized_checkpoint_is_served_and_compiled_dequantized(tmp_path, monkeypatch, family, layout):
    def load(prepared):
        monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", tempfile.mkdtemp(dir=tmp_path))
        return models.load(prepared, lambda phase: None)

    expected = made(family, tmp_path / "model")
    plain, folder = Path(expected.folder), tmp_path / "quantized"
    quantize_experts(plain, folder) if layout == "mxfp4" else quantize(plain, folder, layout)
    expected.model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "reference").eval()
    settings = {"dtype": "float32", "tp_degree": 1, "max_total_tokens": WINDOW, "model_cache": str(tmp_path / "models")}
    prepared = models.prepare(Config(model_id=str(folder), device="neuron", **settings))
    assert error(load(prepared), expected) < 0.01
    output = tmp_path / "compiled"
    words = ["--model-id", str(folder), "--output", str(output), "--tp-degree", "1", "--dtype", "float32"]
    words += ["--model-cache", settings["model_cache"], "--max-total-tokens", str(WINDOW), "--max-batch-size", "1"]
    assert verb.main(words) == 0
    assert error(load(models.prepare(Config(model_id=str(output), device="neuron"))), expected) < 0.01


class Evil:
    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_a_pickled_checkpoint_runs_no_code_whatever_the_default_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # the default before torch 2.6
    expected, evil = made("llama", tmp_path / "model"), Evil()
    save(expected, "pytorch_model.bin")
    evil.path = str(tmp_path / "ran")
    torch.save({"a": evil}, Path(expected.folder) / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be built for Neuron"):
        serve(expected, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_optimum_neuron_is_compiled_with_its_values(reference, tmp_path):  # noqa: F811
    made, folder = reference("llama, grouped"), tmp_path / "optimum"
    section = {"task": "text-generation", "batch_size": 3, "num_cores": 2, "auto_cast_type": "fp32", "sequence_length": WINDOW}
    section |= {"compiler_type": "neuronx-cc", "compiler_version": "2.15.143.0", "checkpoint_id": None}
    shutil.copytree(made.folder, folder / "checkpoint")
    config = json.loads((Path(made.folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"neuron": section}))
    build = BuildPlan.decide(Config(model_id=str(folder), device="neuron"), folder, Manifest.read(folder))
    batch = Batch(NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path))))
    assert (batch.model.batch_size, build.compiled_config.tp_degree, batch.model.max_total_tokens) == (3, 2, WINDOW)
    batch.join(1, [3, 100, 7])
    for _ in range(8):
        batch.step()
    assert_like(made, [3, 100, 7], batch.leave(1))


@pytest.mark.parametrize("limit", [5, WINDOW - 1])
def test_the_longest_prompt_runs_in_the_bucket_of_the_window(reference, tmp_path, limit):  # noqa: F811
    made = reference("llama")
    model = serve(made, tmp_path, max_batch_size=2, max_input_tokens=limit)
    prompt = list(range(1, limit + 1))
    logits = as_float32(model.forward([Chunk(1, prompt, 0)]))
    assert abs(torch.from_numpy(logits[0].copy()) - made.logits(prompt)).max() < 1e-3


def test_a_window_of_4096_runs_long_prompts_through_the_kernel_for_them(reference, tmp_path, monkeypatch):  # noqa: F811
    made, kernels, nki_call = reference("llama, long"), [], attention.nki_call
    monkeypatch.setattr(attention, "nki_call", lambda kernel, *a, **b: kernels.append(kernel) or nki_call(kernel, *a, **b))
    limits = {"max_total_tokens": 4096, "max_input_tokens": None, "prefill_buckets": (128,), "position_buckets": (4096,)}
    model = serve(made, tmp_path, max_batch_size=1, **limits)
    assert model.max_input_tokens == 4095 and kernels
    prompt = [step * step % 255 + 1 for step in range(4095)]
    logits = model.forward([Chunk(0, prompt, 0)])
    assert abs(torch.from_numpy(logits[0].copy()) - made.logits(prompt)).max() < 1e-3
