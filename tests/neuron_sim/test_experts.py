"""Mixtures of experts on the real library, beyond what test_families.py shows of every family."""

import random

import pytest
from family_models import VOCABULARY, Made
from loop import Driven
from test_families import LARGEST, errors, logits_of, made, rounded_to_int8, served_logits  # noqa: F401
from test_server import WINDOW, assert_like, cores, serve  # noqa: F401
from test_speculation import texts_of

from protocol import Generate


@pytest.mark.parametrize(
    ("name", "tp_degree"),
    [
        ("qwen3_moe", 4),
        ("qwen3_moe", 12),
        ("qwen3_moe, 128 experts", 4),
        ("qwen3_moe, 128 experts", 12),
        ("qwen3_moe, not normalized", 4),
        ("olmoe", 4),
        ("gpt_oss", 4),
        ("gpt_oss", 12),
        ("mixtral", 12),
        ("mixtral, window", 4),
    ],
)
def test_experts_are_split_over_cores(made, tmp_path, monkeypatch, name, tp_degree):  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-11")
    model = serve(made(name), tmp_path, max_batch_size=4, tp_degree=tp_degree, prefill_chunk=8)
    assert errors(served_logits(model), logits_of(made(name))).max() < LARGEST


def test_sinks_stay_with_their_heads_where_heads_are_added_at_the_end(tmp_path, monkeypatch):
    """Not after those of each key-value head, as in the test above."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-11")
    reference = Made.named("gpt_oss", tmp_path / "model", num_attention_heads=16, num_key_value_heads=8)
    model = serve(reference, tmp_path, max_batch_size=4, tp_degree=12, prefill_chunk=8)
    assert errors(served_logits(model), logits_of(reference)).max() < LARGEST


@pytest.mark.parametrize("name", ["qwen3_moe, 128 experts", "olmoe", "gpt_oss", "mixtral"])
def test_draft_tokens_and_prefixes_change_no_text(made, tmp_path, name):  # noqa: F811
    reference = made(name)
    model = serve(reference, tmp_path, max_batch_size=4, tp_degree=2, prefill_chunk=8, speculate=5, position_buckets=(16,))
    assert (model.prefill_chunk, model.verify_length, model.sampling) == (8, 6, "hybrid")
    chance = random.Random(11)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in (19, 1, 8, 30, 11)]
    requests = [Generate(n, prompt, WINDOW - len(prompt), ignore_eos=True) for n, prompt in enumerate(prompts)]
    known = {n: reference.greedy(prompt, WINDOW - len(prompt)) for n, prompt in enumerate(prompts)}
    texts, accepted = texts_of(model, requests, known)
    assert texts == known and accepted > 10
    driven = Driven(served=model)
    again = [*prompts[3][:20], 5, 6, 7]
    driven.arrive(Generate(0, prompts[3], 2, ignore_eos=True), Generate(1, again, 9, ignore_eos=True))
    driven.run()
    driven.arrive(Generate(2, again, 9, ignore_eos=True))
    driven.run()
    assert driven.prompts[2].cached > 8
    for n in (1, 2):
        assert_like(reference, again, [*again, *driven.tokens[n]])


# Tiles have 128 values.
@pytest.mark.parametrize(
    ("name", "columns"), [("qwen3_moe", {"moe_intermediate_size": 128}), ("gpt_oss", {"intermediate_size": 128})]
)
def test_options_of_the_library_and_int8_change_no_text(tmp_path, name, columns):
    reference = Made.named(name, tmp_path / "model", hidden_size=256, **columns)
    options = ("weight_tiling=true", "collectives_layout=BSH", "on_device_embedding=true")
    settings = {"tp_degree": 2, "prefill_chunk": 8, "quantize": "int8", "neuron_config": options}
    model = serve(reference, tmp_path, max_batch_size=4, **settings)
    assert errors(served_logits(model), logits_of(rounded_to_int8(reference))).max() < LARGEST
