"""A LoRA adapter is merged as peft merges it; what peft does in another way is rejected by name."""

import dataclasses
import itertools
import json
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, llama, qwen2, save_checkpoint, write_adapter
from transformers import AutoModelForCausalLM

import models
from config import Config
from models.checkpoint import source
from models.checkpoint.lora import merge
from models.errors import ModelError

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("no_children"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("base") / "llama", llama())


def save_adapter(base, folder, **settings):
    """An adapter with random weights, as peft saves it. Returns the logits of the model that peft merged."""
    import peft  # takes seconds

    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    model.save_pretrained(folder)
    return logits(model.merge_and_unload())


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits[0].numpy()


def merged(base, folder, target):
    target.mkdir()
    merge(base, folder, target)
    return logits(AutoModelForCausalLM.from_pretrained(target))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 2}},  # saved in another order
        {"init_lora_weights": False},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_the_merged_model_is_pefts(base, tmp_path, settings):
    expected = save_adapter(base, tmp_path / "adapter", **settings)
    found = merged(base, tmp_path / "adapter", tmp_path / "merged")
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - logits(AutoModelForCausalLM.from_pretrained(base))).max() > 0.1


def test_the_bias_of_an_update_that_is_missing_is_named(tmp_path):
    base = save_checkpoint(tmp_path / "base", qwen2())
    save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], lora_bias=True)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = min(name for name in tensors if name.endswith(".lora_B.bias"))
    module = kept.removesuffix(".lora_B.bias")
    save_file({name: tensor for name, tensor in tensors.items() if name == kept or module not in name}, file)
    with pytest.raises(ModelError, match=r"holds \S+\.lora_B\.bias, but no \S+\.lora_A\.weight"):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("key", ["(", "[q", "*"])
def test_a_key_of_alpha_pattern_that_is_no_regular_expression_is_named(base, tmp_path, key):
    save_adapter(base, tmp_path / "adapter")
    edit_adapter(tmp_path / "adapter", alpha_pattern={key: 2})
    with pytest.raises(ModelError, match=rf"`alpha_pattern` has '{re.escape(key)}': no regular expression"):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}], ids=str)
def test_trained_biases_are_merged(tmp_path, settings):
    base = save_checkpoint(tmp_path / "base", qwen2())
    edit = AutoModelForCausalLM.from_pretrained(base)
    torch.nn.init.normal_(edit.model.layers[0].self_attn.q_proj.bias)  # a bias of zeros looks like none
    edit.save_pretrained(base)
    expected = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], **settings)
    found = merged(base, tmp_path / "adapter", tmp_path / "merged")
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_checkpoint_in_several_files_stays_in_several_files(base, tmp_path):
    expected = save_adapter(base, tmp_path / "adapter")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    found = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` is 'pissa', which cannot be merged; merge the trained model"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "`init_lora_weights` is 'olora'"),
        ({"trainable_token_indices": [1]}, r"`trainable_token_indices` is \[1\]"),
        ({"target_modules": ["embed_tokens"]}, r"holds model\.embed_tokens\.lora_embedding_A, which cannot be merged"),
    ],
    ids=str,
)
def test_what_peft_merges_in_another_way_is_rejected_by_name(base, tmp_path, settings, words):
    save_adapter(base, tmp_path / "adapter", **settings)
    with pytest.raises(ModelError, match=words):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("peft_type", "IA3"),
        ("fan_in_fan_out", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 0.1}),
        ("arrow_config", {"top_k": 3}),
        ("target_parameters", ["experts.down_proj"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1]),
    ],
)
def test_a_setting_that_is_not_supported_is_rejected_by_name(base, tmp_path, name, value):
    save_adapter(base, tmp_path / "adapter")
    edit_adapter(tmp_path / "adapter", **{name: value})
    with pytest.raises(ModelError, match=f"`{name}` is {re.escape(repr(value))}, which cannot be merged"):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


def edit_adapter(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_embeddings_is_not_changed_alone(tmp_path, name):
    base = save_checkpoint(tmp_path / "tied", llama(tie_word_embeddings=True))
    save_adapter(base, tmp_path / "adapter", modules_to_save=[name])
    with pytest.raises(ModelError, match=rf"changes \S*{name}\.weight, which \S+tied ties to its other embeddings"):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    save_adapter(base, tmp_path / "adapter")
    narrow = save_checkpoint(tmp_path / "narrow", llama(hidden_size=32))
    with pytest.raises(ModelError, match=r"the adapter changes model\.layers\.\d\.\S+ in the shape"):
        merged(narrow, tmp_path / "adapter", tmp_path / "merged")
    flat = save_checkpoint(tmp_path / "flat", llama(num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.1\.\S+, which the adapter changes"):
        merged(flat, tmp_path / "adapter", tmp_path / "merged again")


# How checkpoints, and classes of transformers before 4.52 and since then, spell the parts of models that read images.
SPELLINGS = {
    "text": [
        f"{prefix}layers.1.mlp.up_proj"
        for prefix in ("", "model.", "language_model.model.", "model.language_model.", "model.text_model.")
    ],
    "qwen": ("visual.blocks.1.attn.qkv", "model.visual.blocks.1.attn.qkv"),
    "siglip": (
        "vision_tower.vision_model.encoder.layers.1.mlp.fc1",
        "model.vision_tower.vision_model.encoder.layers.1.mlp.fc1",
        "vision_tower.encoder.layers.1.mlp.fc1",
        "model.vision_tower.encoder.layers.1.mlp.fc1",
    ),
    "projector": ("multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"),
    "head": ("lm_head", "language_model.lm_head"),
}
PAIRS = [pair for names in SPELLINGS.values() for pair in itertools.product(names, names)]


@pytest.mark.parametrize(("stored", "named"), PAIRS)
def test_a_module_is_the_same_in_every_spelling_of_the_checkpoint_and_of_the_adapter(tmp_path, stored, named):
    weights = {f"{stored}.weight": torch.randn(6, 4)}
    # Modules of the same place in another part of the model.
    others = ("model.vision_model.layers.1.mlp.up_proj", "audio_tower.layers.1.mlp.up_proj", "mtp.layers.1.mlp.up_proj")
    weights |= {f"{name}.weight": torch.randn(6, 4) for name in others}
    for folder in ("base", "merged"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_file(weights, tmp_path / "base" / "model.safetensors")
    down, up = torch.randn(2, 4), torch.randn(6, 2)
    write_adapter(tmp_path / "adapter", {named: (down, up)}, lora_alpha=1, alpha_pattern={named: 6})
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    expected = weights | {f"{stored}.weight": weights[f"{stored}.weight"] + 3 * up @ down}
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_what_adapter_config_json_leaves_out_has_pefts_default(base, tmp_path):
    expected = save_adapter(base, tmp_path / "adapter", lora_alpha=8)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    np.testing.assert_allclose(merged(base, tmp_path / "adapter", tmp_path / "merged"), expected, atol=1e-4)


@pytest.mark.parametrize("setting", ["merge_lora", "lora_adapters", "lora_folder"])
@pytest.mark.parametrize("on_hub", [False, True])
def test_an_adapter_in_a_pickle_is_refused_with_the_remedy(hub, base, tmp_path, setting, on_hub):
    save_adapter(base, tmp_path / "adapter")
    (file := tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({}, file.with_suffix(".bin"))
    hub.push("someone/adapter", tmp_path / "adapter")
    given = "someone/adapter" if on_hub else str(tmp_path / "adapter")
    config = Config(model_id=str(base), device="cpu", model_cache=str(tmp_path / "cache"))
    with pytest.raises(ModelError) as refused:
        if setting == "lora_folder":
            source.load_updates(config, "mine", given)
        else:
            adapter = f"mine={given}"
            models.prepare(dataclasses.replace(config, **{setting: adapter if setting == "merge_lora" else (adapter,)}))
    said = str(refused.value)
    assert "holds no adapter_model.safetensors; an adapter_model.bin is not read" in said and "save_pretrained" in said
    assert "\n" not in said


def config_of(model_id, tmp_path, adapter):
    return Config(model_id=str(model_id), device="cpu", model_cache=str(tmp_path / "cache"), merge_lora=adapter)


def test_it_is_merged_once_and_again_when_the_adapter_changes(base, tmp_path, monkeypatch):
    expected = save_adapter(base, tmp_path / "adapter")
    config = config_of(base, tmp_path, f"mine={tmp_path / 'adapter'}")
    first = models.prepare(config)
    np.testing.assert_allclose(logits(AutoModelForCausalLM.from_pretrained(first.folder)), expected, atol=1e-4)
    assert first.config.model_name == str(base)
    with monkeypatch.context() as without_merging:
        without_merging.setattr(source, "run_module", None)
        assert models.prepare(config).folder == first.folder
    edit_adapter(tmp_path / "adapter", lora_alpha=1)
    assert models.prepare(config).folder != first.folder


@pytest.mark.usefixtures("conversions")
def test_the_merged_checkpoint_is_there_as_long_as_it_is_served_however_small_the_cache_is(base, tmp_path):
    save_adapter(base, tmp_path / "adapter")
    config = config_of(base, tmp_path, f"mine={tmp_path / 'adapter'}")
    prepared = models.prepare(dataclasses.replace(config, model_cache_size=1e-6))
    models.load(prepared, lambda phase: None)
    assert list((tmp_path / "cache").glob("model-*"))  # its conversion would have removed what was not used last
    assert (prepared.folder / "config.json").is_file()


def test_an_adapter_and_its_base_come_from_the_hub(hub, base, tmp_path):
    expected = save_adapter(base, tmp_path / "adapter")
    hub.push("someone/base", base)
    hub.push("someone/adapter", tmp_path / "adapter", branch="v2")
    prepared = models.prepare(config_of("someone/base", tmp_path, "mine=someone/adapter@v2"))
    np.testing.assert_allclose(logits(AutoModelForCausalLM.from_pretrained(prepared.folder)), expected, atol=1e-4)
    assert prepared.config.model_name == "someone/base"
    assert "README.md" not in hub.fetched


def test_files_of_one_repository_are_different_bases(hub, base, tmp_path, monkeypatch):
    save_adapter(base, tmp_path / "adapter")
    hub.push("someone/base", {"a.gguf": b"1", "b.gguf": b"2"})
    made = {"a.gguf": base, "b.gguf": save_checkpoint(tmp_path / "deeper", llama(num_hidden_layers=3))}
    monkeypatch.setattr(source, "_from_gguf", lambda config, engine, file: (config, made[file.name]))
    of_file = [config_of(f"someone/base:{name}", tmp_path, f"mine={tmp_path / 'adapter'}") for name in made]
    shallow, deep = (models.prepare(config).manifest.config_json["num_hidden_layers"] for config in of_file)
    assert (shallow, deep) == (2, 3)


def test_a_failure_is_one_line_that_says_what_was_done(base, tmp_path):
    save_adapter(base, tmp_path / "adapter", init_lora_weights="pissa")
    with pytest.raises(ModelError) as refused:
        models.prepare(config_of(base, tmp_path, f"mine={tmp_path / 'adapter'}"))
    assert "merging mine into" in str(refused.value) and "`init_lora_weights` is 'pissa'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_adapters_that_are_loaded_at_run_time_leave_no_file_open_and_no_entry_that_stays(base, tmp_path):
    """A training loop may load a new one after each step."""
    config = Config(model_id=str(base), model_cache=str(tmp_path / "cache"), model_cache_size=1e-9)
    open_files = []
    for step in range(3):
        write_adapter(tmp_path / f"{step}", {"layers.0.mlp.up_proj": (torch.ones(1, 4) * step, torch.ones(6, 1))})
        assert source.load_updates(config, "newest", str(tmp_path / f"{step}")).keys() == {"layers.0.mlp.up_proj"}
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[1] == open_files[2]
    assert len(list((tmp_path / "cache").glob("lora-*/entry.json"))) == 1


def test_an_adapter_that_is_loaded_at_run_time_leaves_nothing_where_the_cache_cannot_be_written(base, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(tmp_path / "run"))
    config = Config(model_id=str(base), model_cache="/proc/no-such-folder")
    write_adapter(tmp_path / "adapter", {"layers.0.mlp.up_proj": (torch.ones(1, 4), torch.ones(6, 1))})
    source.load_updates(config, "mine", str(tmp_path / "adapter"))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_without_an_adapter_is_named(base, tmp_path):
    edit_config(save_checkpoint(tmp_path / "no adapter", llama()))
    with pytest.raises(ModelError, match=r"no adapter is not a LoRA adapter: it has no adapter_config\.json"):
        models.prepare(config_of(base, tmp_path, f"mine={tmp_path / 'no adapter'}"))
