"""In any schedule a slot generates what `transformers` alone generates, to the last bit what it generates alone; and what is
refused.

The checkpoints are tiny and random (`tiny_models`); the expected tokens come from `generate`, greedily, up to the last position
of the window.
"""

import json
import os
import random
import re
import resource
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from loop import Driven, Oracle
from published import folders
from published.families import FAMILIES
from safetensors.torch import load_file, save_file
from tiny_models import (
    POSITIONS,
    VOCABULARY,
    Reference,
    edit_config,
    generate,
    reference_model,
    references,
    run,
    save_checkpoint,
    settings,
)

import models.checkpoint.pretrained
import models.openvino.model
import models.pytorch.model
import worker
from config import Config
from manifest import Manifest
from models.base import Chunk
from models.cache import NotConverted
from models.errors import DeviceLost, ModelError
from models.openvino import OpenVino
from models.pytorch.model import TorchModel
from protocol import Generate
from run import ConfigError

pytestmark = pytest.mark.models


@pytest.fixture(scope="session")
def served(zoo):
    """A family's model with four slots, made when it is first needed."""
    return cache(lambda family: serve(zoo.folder(family), max_batch_size=4))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def torch_model_is_imported():
    """That takes seconds, which an import at this module's top costs each of pytest's workers."""
    import models.pytorch.model  # noqa: F401


def serve(folder, device="cpu", **changes):
    return models.pytorch.model.TorchModel(settings(folder, **changes), Path(folder), device)


def continued(model, reference: Reference) -> list[int]:
    return run(model, [reference.prompt])[0].tokens


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_a_sequence_is_that_of_transformers_alone_and_in_any_schedule_to_the_last_bit(zoo, served, family):
    model, chosen, index = served(family), zoo.references(family), list(tiny_models.ALL).index(family)
    prefill_chunk = (3, 4, 128)[index % 3]
    alone = [run(model, [reference.prompt], 0, prefill_chunk)[0] for reference in chosen]
    for sequence, reference in zip(alone, chosen):
        assert sequence.tokens == reference.tokens
        assert len(reference.prompt) + len(reference.tokens) == POSITIONS
    together = run(model, [reference.prompt for reference in chosen] * 2, index, prefill_chunk)
    assert any(sequence.tokens == own.tokens for sequence, own in zip(together, alone * 2))
    for sequence, own in zip(together, alone * 2):
        assert sequence.tokens == own.tokens[: len(sequence.tokens)]
        assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


BITS = [(family, "float32", 32) for family in ("llama", "mistral", "gpt2", "gemma2", "falcon")]
BITS += [("llama", "bfloat16", 32), ("llama", "float32", 7), ("mixtral", "float32", 7)]


@pytest.mark.parametrize(("family", "dtype", "slots"), BITS)
def test_one_to_all_rows_in_any_slots_change_no_bit(zoo, family, dtype, slots):
    model, chance = serve(zoo.folder(family), dtype=dtype, max_batch_size=slots), random.Random(0)
    prompt, begin, token = zoo.references(family)[3].prompt, 11, 3
    for slot in range(slots):
        model.forward([Chunk(slot, prompt, 0)])
    alone = model.forward([Chunk(0, [token], begin)])
    for company in range(slots):
        own, *others = chance.sample(range(slots), company + 1)
        rows = [Chunk(slot, [chance.randrange(VOCABULARY)], chance.randrange(11, POSITIONS)) for slot in others]
        found = model.forward([*rows, Chunk(own, [token], begin)])
        assert found.shape == (company + 1, VOCABULARY)
        assert np.array_equal(found[-1:], alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_long_sums_give_the_same_bits_alone_and_in_company(tmp_path, threads):
    """A kernel for one row splits them; with two threads one of them may get the fifth row alone."""
    torch.set_num_threads(threads)
    config = tiny_models.llama(intermediate_size=2048, num_hidden_layers=1)
    model = serve(save_checkpoint(tmp_path, config), max_batch_size=5)
    rows = [Chunk(slot, [1], 0) for slot in range(5)]
    together, alone = model.forward(rows), np.concatenate([model.forward([chunk]) for chunk in rows])
    torch.set_num_threads(1)
    assert np.array_equal(together, alone)
    assert np.array_equal(together, together[:1].repeat(5, 0))


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_the_texts_differ_so_that_a_mix_up_would_show(zoo, family):
    chosen = zoo.references(family)
    assert len({tuple(reference.tokens) for reference in chosen}) == len(chosen)
    assert len({token for reference in chosen for token in reference.tokens}) > 10


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("qwen2-sliding", {"layer_types": ["full_attention"] * 3}),
        ("qwen2-sliding", {"layer_types": ["sliding_attention"] * 3}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("llama", {"rope_parameters": tiny_models.rope(rope_theta=10000.0)}),
    ],
)
def test_what_makes_a_family_special_matters_to_its_texts(zoo, family, changes):
    reference = zoo.references(family)[2]
    without = reference_model(zoo.folder(family), **changes)
    assert generate(without, torch.tensor([reference.prompt]))[0] != [reference.tokens]


@pytest.mark.parametrize("window", [6, POSITIONS - 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-j"])
def test_a_window_smaller_than_the_models_ends_a_text_early_and_changes_nothing_else(zoo, family, window):
    reference = zoo.references(family)[2]
    model = serve(zoo.folder(family), max_total_tokens=window)
    assert continued(model, reference) == reference.tokens[: window - 5]


@pytest.mark.parametrize(("slots", "window"), [(1, 2), (3, 2), (1, POSITIONS)])
def test_limits_may_be_as_small_as_they_get(zoo, slots, window):
    reference = zoo.references("llama")[0]
    model = serve(zoo.folder("llama"), max_batch_size=slots, max_total_tokens=window, max_input_tokens=1)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (slots, window, 1)
    assert continued(model, reference) == reference.tokens[: window - 1]


def test_a_model_states_what_it_is(zoo):
    model = serve(zoo.folder("llama"), max_batch_size=3, max_total_tokens=None)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (3, POSITIONS, POSITIONS - 1)
    assert (model.engine, model.device, model.dtype, model.quantize) == ("torch", "cpu", "float32", None)
    assert (model.vocab_size, model.sampling, model.supports_chunked_prefill, model.prefill_chunk) == (
        VOCABULARY,
        "host",
        False,
        128,
    )


def test_logits_are_float32_rows_in_the_order_of_the_chunks_and_later_calls_leave_them_alone(zoo, served):
    model, reference = served("llama"), zoo.references("llama")[2]
    model.forward([Chunk(2, reference.prompt, 0)])
    first = model.forward([Chunk(0, reference.prompt, 0)])
    before = first.copy()
    rows = model.forward([Chunk(2, [7], 5), Chunk(0, [reference.tokens[0]], 5)])
    assert (first.shape, first.dtype, rows.shape, rows.dtype) == ((1, VOCABULARY), np.float32, (2, VOCABULARY), np.float32)
    assert np.array_equal(first, before)
    for token, row in zip((7, reference.tokens[0]), rows):
        expected = models.checkpoint.pretrained.reference_logits(
            reference_model(zoo.folder("llama")), [*reference.prompt, token]
        )
        np.testing.assert_allclose(row, expected[5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_attention_may_come_back_in_another_memory_order_as_from_cuda_kernels(zoo, monkeypatch, family):
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_token_by_token(*arguments, **options):
        return attend(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_token_by_token)
    reference = zoo.references(family)[2]
    assert continued(serve(zoo.folder(family)), reference) == reference.tokens


def test_a_module_may_view_what_attention_returns_in_any_memory_order(tmp_path, monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *arguments, **options: attend(*arguments, **options).contiguous(),
    )
    (trinity,) = (family for family in FAMILIES if family.name == "Trinity")  # whose attention views it
    folder = folders.write(tmp_path / "model", trinity)
    assert TorchModel(settings(folder), folder, "cpu").engine == "torch"


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_the_logits_after_every_prompt_token_are_those_of_transformers(zoo, served, family):
    model, expected, chosen = served(family), reference_model(zoo.folder(family)), zoo.references(family)
    assert model.supports_prompt_logits
    sequences = run(model, [reference.prompt for reference in chosen], 3, prefill_chunk=3, all_logits=True)
    for sequence, reference in zip(sequences, chosen):
        with torch.inference_mode():
            wanted = expected(torch.tensor([reference.prompt])).logits[0]
        whole = model.forward([Chunk(1, reference.prompt, 0, all_logits=True)])
        for found in (whole, sequence.logits[: len(wanted)]):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert sequence.tokens == reference.tokens[: len(sequence.tokens)]


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.WITH_THEIR_OWN_ATTENTION)
def test_texts_with_draft_tokens_are_those_of_transformers(zoo, family):
    """Of rows with and without draft tokens in one step; up to the end of the slot."""
    found = zoo.references(family)
    model = serve(zoo.folder(family), max_batch_size=3, speculate=4)
    assert (model.verify_length, model.max_draft_rows) == (5, 15)
    chance, driven = random.Random(0), Driven(served=model)
    texts = [reference.tokens[: POSITIONS - len(reference.prompt)] for reference in found]
    requests = [Generate(n, each.prompt, len(text), ignore_eos=True) for n, (each, text) in enumerate(zip(found, texts))]
    with pytest.MonkeyPatch.context() as patch:
        oracles = iter([Oracle(text, chance) for text in texts])
        patch.setattr(worker, "NgramProposer", lambda *_: next(oracles))
        for request in requests:
            driven.arrive(request)
            driven.step(chance.randrange(1, 3))
        driven.run()
    assert [driven.tokens[request.id] for request in requests] == texts
    assert sum(token.from_draft for _peer, message in driven.wire.sent for token in getattr(message, "tokens", [])) > 10


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.WITH_THEIR_OWN_ATTENTION)
def test_bfloat16_is_near(zoo, served, family):
    prompt = zoo.references(family)[4].prompt
    exact, rounded = served(family), serve(zoo.folder(family), dtype="bfloat16")
    assert rounded.dtype == "bfloat16"
    for chunk in (Chunk(0, prompt, 0), Chunk(0, [3], 16)):
        expected, found = exact.forward([chunk]), rounded.forward([chunk])
        assert 0 < np.abs(found - expected).max() < 0.15 * np.abs(expected).max()


def test_a_mixture_whose_experts_swap_with_a_rounding_is_served_in_bfloat16(tmp_path):
    wide = tiny_models.GROUPED | {"hidden_size": 128, "num_hidden_layers": 4}
    config = transformers.MixtralConfig(**wide, num_local_experts=8, num_experts_per_tok=2)
    assert serve(save_checkpoint(tmp_path, config, spread=0.15), dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("is_step", [True, False], ids=["decode steps", "prompts"])
def test_a_fault_of_decode_steps_alone_or_of_prompts_alone_is_found(zoo, monkeypatch, family, is_step):
    run = models.pytorch.model.TorchModel._run

    def wrong(model, chunks, **kind):
        logits = run(model, chunks, **kind)
        return logits[:, ::-1] if kind["is_step"] == is_step else logits

    monkeypatch.setattr(models.pytorch.model.TorchModel, "_run", wrong)
    fault = "its (logits differ from those of|KL divergence from) transformers"
    assert re.search(f"static batch: {fault}", refusal(zoo.folder(family)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_logits_that_are_no_numbers_are_refused_in_one_line_that_names_the_model_and_the_type(tmp_path, dtype):
    """In float16 because they are too large for it."""
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= np.nan if dtype == "float32" else 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder, dtype=dtype).startswith(f"{folder} produced NaN or infinite logits in {dtype}: ")


@pytest.mark.parametrize("can_multiply", [True, False])
@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_plain_pytorch_computes_in_bfloat16_where_the_cpu_and_the_checkpoint_do_or_where_it_is_asked_for(
    tmp_path, saved, can_multiply, dtype, monkeypatch
):
    def reject(*_arguments):
        raise NotConverted("a test")

    monkeypatch.setattr(models, "cpu_multiplies_bfloat16", lambda: can_multiply)
    monkeypatch.setattr("models.openvino.OpenVino.load", reject)
    folder = save_checkpoint(tmp_path, tiny_models.llama(), dtype=getattr(torch, saved))
    model = models.load(OpenVino(settings(folder, dtype=dtype), folder, Manifest.read(folder)), print)
    is_bfloat16 = dtype == "bfloat16" or (saved == "bfloat16" and can_multiply)
    assert model.dtype == ("bfloat16" if is_bfloat16 else "float32")


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "gelu"}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1, "head_dim": 6}],
    ids=str,
)
def test_variants_of_llama_give_the_tokens_of_transformers(tmp_path, changes):
    folder = save_checkpoint(tmp_path, tiny_models.llama(**changes))
    (reference,) = references(folder, [5])
    assert continued(serve(folder), reference) == reference.tokens


def test_gemma_3n_is_served_as_it_is_published_without_its_towers(tmp_path):
    """Its vision tower needs the package timm."""
    text = folders.write(tmp_path / "text", next(family for family in FAMILIES if family.name == "Gemma 3n, text"))
    published = tmp_path / "published"
    shutil.copytree(text, published)
    weights = load_file(text / "model.safetensors")
    weights = {re.sub("^model", "model.language_model", name): weight for name, weight in weights.items()}
    weights |= {f"model.{name}.weight": torch.zeros(1) for name in ("vision_tower.timm_model.conv_stem", "audio_tower.norm")}
    save_file(weights, published / "model.safetensors", {"format": "pt"})
    towers = {"vision_config": {"architecture": "mobilenetv5_300m_enc"}, "audio_config": {}}
    config = {"model_type": "gemma3n", "text_config": json.loads((text / "config.json").read_text()), **towers}
    (published / "config.json").write_text(json.dumps(config))
    expected, found = (serve(folder).forward([Chunk(0, [5, 6, 7, 8, 9], 0)]) for folder in (text, published))
    assert np.array_equal(found, expected)


def test_a_device_error_that_every_later_call_would_meet_is_the_loss_of_the_device(zoo, monkeypatch):
    def fails(*_args, **_kwargs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore lines")

    model = serve(zoo.folder("llama"))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    with pytest.raises(DeviceLost, match=r"illegal memory access was encountered$"):
        model.forward([Chunk(0, [1, 2], 0)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_on_a_gpu_a_full_batch_generates_what_transformers_does(zoo, family):
    chosen = zoo.references(family)
    model = serve(zoo.folder(family), device="cuda", dtype="float32", max_batch_size=4)
    for sequence, reference in zip(run(model, [reference.prompt for reference in chosen]), chosen):
        assert sequence.tokens == reference.tokens[: len(sequence.tokens)]


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}])
def test_checkpoints_of_transformers_4_and_5_give_the_same_tokens(tmp_path, scaling):
    new_rope = tiny_models.rope() if scaling is None else tiny_models.rope(rope_type="linear", factor=2.0)
    new, old, other = (
        save_checkpoint(tmp_path / name, tiny_models.llama(rope_parameters=new_rope)) for name in ("new", "old", "other")
    )
    written = json.loads((new / "config.json").read_text())
    assert "rope_parameters" in written and "dtype" in written and "rope_theta" not in written
    form = {"rope_scaling": scaling, "torch_dtype": "float32", "transformers_version": "4.48.3"}
    edit_config(old, remove=("rope_parameters", "dtype"), rope_theta=tiny_models.ROPE_THETA, **form)
    edit_config(other, remove=("rope_parameters", "dtype"), rope_theta=10000.0, **form)

    (reference,) = references(new, [5])
    tokens = {folder.name: continued(serve(folder), reference) for folder in (new, old, other)}

    assert tokens["new"] == tokens["old"] == reference.tokens
    assert tokens["other"] != tokens["new"]


def refusal(folder, **changes) -> str:
    """The one line that a person reads who wants to serve `folder`."""
    with pytest.raises((ConfigError, ModelError)) as caught:
        serve(folder, **changes)
    message = str(caught.value)
    assert message.strip() and "\n" not in message
    return message


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, transformers.BertConfig(**tiny_models.GROUPED | {"pad_token_id": 0}))
    assert "static batch" in refusal(folder)


def test_a_window_that_the_attention_does_not_get_is_refused_where_it_would_have_to_slide(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    edit_config(folder, sliding_window=tiny_models.SLIDING)
    assert "give --max-total-tokens 8 or less" in refusal(folder)
    assert serve(folder, max_total_tokens=tiny_models.SLIDING).max_total_tokens == tiny_models.SLIDING


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite_header(path: Path) -> None:
    path.write_bytes(b"<!doctype html>" + path.read_bytes()[15:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, overwrite_header, empty])
def test_a_damaged_weights_file_is_refused(tmp_path, damage):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    damage(folder / "model.safetensors")
    assert refusal(folder).startswith(f"{folder} cannot be loaded: SafetensorError: ")


def test_a_checkpoint_that_lacks_a_shard_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    os.rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(weights, "model-00001-of-00002.safetensors") | {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1000, "hidden_size": 8192}, {"vocab_size": 10**7}])
def test_a_config_of_more_parameters_than_the_weights_hold_is_refused_before_memory_is_taken(tmp_path, changes):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    tiny_models.llama(**changes).save_pretrained(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refusal(folder)
    assert line.startswith(f"{folder}: config.json describes ") and "billion parameters, more than its weight files of " in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_the_tensor_named(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder) == f"{folder} lacks 1 of its weights, model.layers.1.mlp.up_proj.weight among them"


def shard(folder, count=3):
    """Splits the weights over files whose names count them, without an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number in range(count):
        some = {name: weights[name] for name in sorted(weights)[number::count]}
        save_file(some, folder / f"model-{number + 1:05}-of-{count:05}.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "mistral3", "qwen2.5-vl"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_without_an_index_are_read_by_their_names(tmp_path, family, dtype):
    folder = save_checkpoint(tmp_path / "model", tiny_models.ALL[family]())
    expected = models.checkpoint.pretrained.load_pretrained(settings(folder, dtype=dtype), folder, "cpu").state_dict()
    shard(folder)
    files = sorted(path.name for path in folder.iterdir())
    found = models.checkpoint.pretrained.load_pretrained(settings(folder, dtype=dtype), folder, "cpu").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(path.name for path in folder.iterdir()) == files


def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused_and_the_tensor_named(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(40)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("form", ["new", "old"])
def test_positions_that_stretch_with_the_longest_text_are_refused_beyond_what_they_were_trained_for(tmp_path, form):
    rope = tiny_models.rope(rope_type="dynamic", factor=2.0)
    folder = save_checkpoint(tmp_path, tiny_models.llama(rope_parameters=rope, max_position_embeddings=POSITIONS // 2))
    if form == "old":
        old_rope = {"type": "dynamic", "factor": 2.0}
        edit_config(folder, remove=("rope_parameters",), rope_theta=tiny_models.ROPE_THETA, rope_scaling=old_rope)
    lengths = {"max_total_tokens": POSITIONS // 2 + 1, "max_input_tokens": POSITIONS // 2}
    config = Config(model_id=str(folder), device="cpu", max_batch_size=1, **lengths)
    with pytest.raises(ModelError, match=f"give --max-total-tokens {POSITIONS // 2} or less"):
        models.pytorch.model.TorchModel(config, folder, "cpu")
    assert serve(folder, max_total_tokens=POSITIONS // 2).max_total_tokens == POSITIONS // 2


@pytest.mark.parametrize("name", ["owner/kernel", "flash_attention_2"])
def test_attention_that_a_checkpoint_names_is_not_loaded(tmp_path, name):
    """transformers takes it from the hub, and runs it, where the package `kernels` is installed."""
    folder = edit_config(save_checkpoint(tmp_path / "m", tiny_models.llama()), _attn_implementation=name)
    model = models.checkpoint.pretrained.load_pretrained(settings(folder), folder, "cpu")
    assert np.isfinite(models.checkpoint.pretrained.reference_logits(model, [1, 2, 3])).all()


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_a_model_computes_in_float32_what_its_float32_copy_does_to_the_last_bit_and_stays_as_it_is(tmp_path, family):
    folder = save_checkpoint(tmp_path, tiny_models.ALL[family](), dtype=torch.bfloat16)
    model = models.checkpoint.pretrained.load_pretrained(settings(folder, dtype="bfloat16"), folder, "cpu")
    stored = [parameter.dtype for parameter in model.parameters()]
    prompts = ([*range(1, 12)], 0), ([*range(1, 6)], 3)
    with models.checkpoint.pretrained.InFloat32(torch.bfloat16):
        found = [models.checkpoint.pretrained.reference_logits(model, *prompt) for prompt in prompts]
    assert torch.bfloat16 in stored and [parameter.dtype for parameter in model.parameters()] == stored
    rounded = models.checkpoint.pretrained.reference_logits(model, *prompts[0])
    model.float()
    assert all(
        np.array_equal(one, models.checkpoint.pretrained.reference_logits(model, *prompt))
        for one, prompt in zip(found, prompts)
    )
    assert not np.array_equal(found[0], rounded)
