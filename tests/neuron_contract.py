"""What transformers-neuronx does with the calls of a server, as tests that the library and its fake must both pass.

`test_neuron_fake.py` runs them against the fake. The library itself runs on a CPU with the simulator of its device packages
(`neuron_sim`), when both are on the path. Only the library's own interface is used, and nothing that it does silently wrong.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers_neuronx import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaForSampling,
    MistralForSampling,
    NeuronAutoModelForCausalLM,
    NeuronConfig,
    OPTForSampling,
)
from transformers_neuronx.constants import GQA, Layout

VOCABULARY = 64
SLOTS = 4
POSITIONS = [8, 16, 32]
CONTEXTS = [4, 8, 16]
TOLERANCE = 1e-4

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, config: dict = LLAMA) -> Path:
    """config.json, and weights of Llama's names and shapes where safetensors is there to write them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        from safetensors.torch import save_file
    except ImportError:
        (folder / "model.safetensors").touch()  # the fake only looks whether it is there
    else:
        save_file(
            _opt_weights(config) if config["model_type"] == "opt" else _llama_weights(config), folder / "model.safetensors"
        )
    return folder


def _random(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) * 0.3


def _llama_weights(config: dict) -> dict[str, torch.Tensor]:
    random, hidden, inner = _random(0), config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": random(VOCABULARY, hidden) for name in ("model.embed_tokens", "lm_head")}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    return weights


def _opt_weights(config: dict) -> dict[str, torch.Tensor]:
    random, hidden, inner = _random(0), config["hidden_size"], config["ffn_dim"]
    weights = {"lm_head.weight": random(VOCABULARY, hidden), "model.decoder.embed_tokens.weight": random(VOCABULARY, hidden)}
    weights["model.decoder.embed_positions.weight"] = random(config["max_position_embeddings"] + 2, hidden)
    linear = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
    linear |= {"fc1": (inner, hidden), "fc2": (hidden, inner)}
    norms = [f"layers.{layer}.{name}" for layer in range(2) for name in ("self_attn_layer_norm", "final_layer_norm")]
    for name in [*norms, "final_layer_norm"]:
        weights |= {f"model.decoder.{name}.weight": torch.ones(hidden), f"model.decoder.{name}.bias": torch.zeros(hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in linear.items():
            weights[f"model.decoder.layers.{layer}.{name}.weight"] = random(*shape)
            weights[f"model.decoder.layers.{layer}.{name}.bias"] = random(shape[0])
    return weights


def load(folder: Path, cls=LlamaForSampling, **options):
    """A model that is not on the device yet: one sequence, unless `options` say otherwise."""
    settings = {"tp_degree": 1, "amp": "f32", "n_positions": POSITIONS, "context_length_estimate": CONTEXTS}
    return cls.from_pretrained(str(folder), **settings | options)


def load_slots(folder: Path, slots: int = SLOTS, neuron: dict | None = None, **options):
    """The same with continuous batching."""
    config = NeuronConfig(
        continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=slots), **{} if neuron is None else neuron
    )
    return load(folder, **{"batch_size": slots, "neuron_config": config} | options)


def on_device(model):
    model.to_neuron()
    return model


@torch.inference_mode()
def call(model, *arguments):
    return model(*arguments)


def prefill(model, prompt: list[int], slot: int) -> torch.Tensor:
    return call(model, torch.tensor([prompt]), torch.arange(len(prompt))[None], torch.tensor([slot]))


def decode(model, tokens: list[int], positions: list[int], slots: list[int]) -> torch.Tensor:
    return call(model, torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], torch.tensor(slots))


def alone(model, prompt: list[int], fed: list[int], slot: int = 0) -> torch.Tensor:
    """The logits after `prompt` and after each of the tokens `fed` to it, with no other slot in use: [1 + fed, vocab]."""
    rows = [prefill(model, prompt, slot)]
    rows += [decode(model, [token], [len(prompt) + n], [slot]) for n, token in enumerate(fed)]
    return torch.cat(rows)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < TOLERANCE


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = text(5, 1), text(3, 2), text(9, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    """Continuous batching. Tests share it: each begins with prefills into the slots that it uses."""
    return on_device(load_slots(folder))


@pytest.fixture(scope="module")
def static(folder):
    """One sequence, or two that go together."""
    return on_device(load(folder, batch_size=[2, 1]))


@pytest.fixture(scope="module")
def sampler(folder):
    """The device draws the tokens, with parameters of their own for each slot."""
    return on_device(load_slots(folder, neuron=sampling(top_k=[1] * SLOTS, per_batch_line=True)))


def sampling(**settings) -> dict:
    generation = GenerationConfig(**{"do_sample": True, "dynamic": True} | settings)
    return {"on_device_embedding": True, "on_device_generation": generation}


def zeros(batch: int) -> torch.Tensor:
    return torch.zeros(batch, dtype=torch.int64)


# Prefill and decode


def test_prefill_gives_the_logits_of_the_last_token(model):
    logits = prefill(model, A, 2)
    assert logits.shape == (1, VOCABULARY)
    assert logits.dtype == torch.float32
    assert logits.device.type == "cpu"
    assert not logits.requires_grad


def test_decode_gives_a_row_for_each_named_slot(model):
    prefill(model, A, 1)
    prefill(model, B, 3)
    logits = decode(model, [7, 8], [len(A), len(B)], [1, 3])
    assert logits.shape == (2, VOCABULARY)
    assert logits.dtype == torch.float32
    assert logits.device.type == "cpu"
    assert not logits.requires_grad


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 15])
def test_a_decoded_token_counts_like_one_of_the_prompt(model, length):
    tokens = text(length + 1, length)
    assert_same(alone(model, tokens[:-1], tokens[-1:])[1:], prefill(model, tokens, 0))


def test_logits_depend_on_every_token(model):
    logits = prefill(model, A, 0)
    for changed in range(len(A)):
        other = [*A]
        other[changed] = 3 + (A[changed] - 2) % (VOCABULARY - 3)
        assert (prefill(model, other, 0) - logits).abs().max() > 1e-3


def test_rows_come_in_the_order_of_the_slots_that_were_named(model):
    prompts, slots, fed = [A, B, C, A[:2]], [3, 0, 2, 1], [11, 12, 13, 14]
    expected = torch.stack([alone(model, prompt, [token])[1] for prompt, token in zip(prompts, fed)])
    for prompt, slot in zip(prompts, slots):
        prefill(model, prompt, slot)
    assert_same(decode(model, fed, [len(prompt) for prompt in prompts], slots), expected)


def test_one_that_joins_does_not_disturb_the_others(model):
    fed = text(12, 4)
    expected_a, expected_b = alone(model, A, fed), alone(model, C, fed[6:], slot=2)
    found_a = [prefill(model, A, 0)]
    found_a += [decode(model, [fed[n]], [len(A) + n], [0]) for n in range(6)]
    found_b = [prefill(model, C, 3)]
    for n in range(6):
        both = decode(model, [fed[6 + n]] * 2, [len(C) + n, len(A) + 6 + n], [3, 0])
        found_b.append(both[:1])
        found_a.append(both[1:])
    assert_same(torch.cat(found_a), expected_a)
    assert_same(torch.cat(found_b), expected_b)


def test_one_that_leaves_does_not_disturb_the_others(model):
    fed = text(6, 5)
    expected = alone(model, A, fed)
    prefill(model, A, 1)
    prefill(model, B, 0)
    found = [decode(model, [fed[n], 9], [len(A) + n, len(B) + n], [1, 0])[:1] for n in range(3)]
    found += [decode(model, [fed[n]], [len(A) + n], [1]) for n in range(3, 6)]
    assert_same(torch.cat(found), expected[1:])


@pytest.mark.parametrize("former", [2, 6, 16])
def test_a_slot_shows_nothing_of_the_one_before(model, former):
    fed = text(20, 6)
    expected = alone(model, A, fed, slot=0)
    alone(model, text(former, 7), text(10, 8), slot=1)
    assert_same(alone(model, A, fed, slot=1), expected)


def test_two_prompts_in_one_call(model):
    expected = torch.cat([alone(model, A, [5]), alone(model, C, [6])])
    ids, positions = torch.zeros(2, len(C), dtype=torch.int64), torch.zeros(2, len(C), dtype=torch.int64)
    for row, prompt in enumerate([A, C]):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        positions[row, : len(prompt)] = torch.arange(len(prompt))
    logits = call(model, ids, positions, torch.tensor([3, 1]))
    assert_same(logits, expected[[0, 2]])
    assert_same(decode(model, [5, 6], [len(A), len(C)], [3, 1]), expected[[1, 3]])


def test_logits_that_were_given_do_not_change_later(model):
    first = prefill(model, A, 0)
    before = first.clone()
    second = decode(model, [5], [len(A)], [0])
    after_second = second.clone()
    decode(model, [6], [len(A) + 1], [0])
    assert torch.equal(first, before)
    assert torch.equal(second, after_second)


def test_arguments_are_not_changed(model):
    prompt = (torch.tensor([A]), torch.arange(len(A))[None], torch.tensor([2]))
    step = (torch.tensor([[5]]), torch.tensor([[len(A)]]), torch.tensor([2]))
    for arguments in (prompt, step):
        before = [argument.clone() for argument in arguments]
        call(model, *arguments)
        assert all(torch.equal(one, other) for one, other in zip(arguments, before))


def test_a_prompt_of_one_token_goes_as_two_with_position_0_twice(model):
    fed = [7, 8, 9]
    expected_a = alone(model, A, fed)
    prefill(model, A, 0)
    one = call(model, torch.tensor([[21, 0]]), torch.tensor([[0, 0]]), torch.tensor([2]))
    assert one.shape == (1, VOCABULARY)
    both = decode(model, [fed[0], 22], [len(A), 1], [0, 2])
    assert_same(both[0], expected_a[1])
    assert_same(both[1], prefill(model, [21, 22], 1)[0])


def test_a_slot_is_held_back_with_its_last_token_at_the_same_position(model):
    fed = text(5, 9)
    expected_a, expected_b = alone(model, A, fed), alone(model, B, [30, 31])
    prefill(model, A, 0)
    prefill(model, B, 1)
    held = decode(model, [fed[0], B[-1]], [len(A), len(B) - 1], [0, 1])
    assert_same(held[1], expected_b[0])
    decode(model, [fed[1], B[-1]], [len(A) + 1, len(B) - 1], [0, 1])
    decode(model, [fed[2], 30], [len(A) + 2, len(B)], [0, 1])
    both = decode(model, [fed[3], 30], [len(A) + 3, len(B)], [0, 1])
    assert_same(both, torch.stack([expected_a[4], expected_b[1]]))
    both = decode(model, [fed[4], 31], [len(A) + 4, len(B) + 1], [0, 1])
    assert_same(both, torch.stack([expected_a[5], expected_b[2]]))


def test_all_slots_can_be_named_with_free_ones_at_position_0(model):
    expected = alone(model, A, [5, 6])
    prefill(model, A, 2)
    found = [decode(model, [0, 0, token, 0], [0, 0, len(A) + n, 0], [0, 1, 2, 3])[2] for n, token in enumerate([5, 6])]
    assert_same(torch.stack(found), expected[1:])


# Borders


@pytest.mark.parametrize("length", [*range(2, 18)])
def test_prompts_up_to_the_largest_context_bucket(model, length):
    prompt = text(length, length)
    if length > CONTEXTS[-1]:
        with pytest.raises(AssertionError):
            prefill(model, prompt, 1)
    else:
        assert prefill(model, prompt, 1).shape == (1, VOCABULARY)


@pytest.mark.parametrize("start", [2, 3, 4, 7, 8, 9, 15, 16])
def test_every_position_up_to_the_last_can_be_decoded(model, start):
    tokens = text(POSITIONS[-1], 10)
    logits = alone(model, tokens[:start], tokens[start:])
    in_one_go = torch.cat([prefill(model, tokens[:length], 1) for length in range(start, CONTEXTS[-1] + 1)])
    assert_same(logits[: len(in_one_go)], in_one_go)
    assert len(logits) == POSITIONS[-1] - start + 1
    with pytest.raises(StopIteration):
        decode(model, [5], [POSITIONS[-1]], [0])


def test_one_row_past_the_last_position_stops_all(model):
    prefill(model, A, 0)
    prefill(model, B, 1)
    expected = alone(model, A, [5], slot=2)
    prefill(model, A, 0)
    with pytest.raises(StopIteration):
        decode(model, [5, 5], [len(A), POSITIONS[-1]], [0, 1])
    assert_same(decode(model, [5], [len(A)], [0])[0], expected[1])


def test_a_short_row_next_to_a_long_one(model):
    """The bucket is that of the longest row."""
    long = text(16, 11)
    expected_long, expected_short = alone(model, long, [5]), alone(model, B, [6])
    prefill(model, long, 3)
    prefill(model, B, 0)
    both = decode(model, [6, 5], [len(B), len(long)], [0, 3])
    assert_same(both, torch.stack([expected_short[1], expected_long[1]]))


# Dtypes and errors


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_integers_of_two_sizes(model, ids, positions, slots):
    expected = alone(model, A, [5], slot=1)
    prompt = (torch.tensor([A], dtype=ids), torch.arange(len(A), dtype=positions)[None], torch.tensor([1], dtype=slots))
    step = (torch.tensor([[5]], dtype=ids), torch.tensor([[len(A)]], dtype=positions), torch.tensor([1], dtype=slots))
    assert_same(call(model, *prompt)[0], expected[0])
    if ids == positions:
        assert_same(call(model, *step)[0], expected[1])
    else:
        with pytest.raises(RuntimeError):
            call(model, *step)


def test_slots_of_a_decode_call_can_have_two_dimensions(model):
    expected = alone(model, A, [5])
    prefill(model, A, 1)
    assert_same(call(model, torch.tensor([[5]]), torch.tensor([[len(A)]]), torch.tensor([[1]])), expected[1:])


IDS, PLACES, SLOT = torch.tensor([A]), torch.arange(len(A))[None], torch.tensor([1])
TOKEN, PLACE = torch.tensor([[5]]), torch.tensor([[len(A)]])
REFUSED = {
    "prompt too long": ((torch.ones(1, 17, dtype=torch.int64), torch.arange(17)[None], SLOT), AssertionError),
    "prompt with a row of positions": ((IDS, PLACES[0], SLOT), AssertionError),
    "prompt without positions": ((IDS, None, SLOT), AttributeError),
    "prompt with slots in two dimensions": ((IDS, PLACES, SLOT[None]), AssertionError),
    "prompt from a later position": ((IDS, PLACES + 4, SLOT), AssertionError),
    "prompt in one dimension": ((IDS[0], PLACES, SLOT), ValueError),
    "prompt with a token that there is not": ((IDS + VOCABULARY, PLACES, SLOT), IndexError),
    "prompt with a token below 0": ((IDS - VOCABULARY, PLACES, SLOT), IndexError),
    "fewer slots than prompts": ((IDS.expand(2, -1), PLACES.expand(2, -1), SLOT), KeyError),
    "fewer positions than tokens": ((IDS, PLACES[:, :-1], SLOT), RuntimeError),
    "more prompts than positions": ((IDS.expand(2, -1), PLACES, torch.tensor([0, 1])), AssertionError),
    "step with a row of positions": ((TOKEN, PLACE[0], SLOT), IndexError),
    "step without positions": ((TOKEN, None, SLOT), TypeError),
    "step with positions of another dtype": ((TOKEN, PLACE.int(), SLOT), RuntimeError),
    "step of int32 ids with int64 positions": ((TOKEN.int(), PLACE, SLOT), RuntimeError),
    "step in a slot that there is not": ((TOKEN, PLACE, torch.tensor([SLOTS])), RuntimeError),
    "step in a slot below 0": ((TOKEN, PLACE, torch.tensor([-1])), RuntimeError),
    "step with more slots than tokens": ((TOKEN, PLACE, torch.tensor([1, 2])), RuntimeError),
    "step with a token that there is not": ((TOKEN + VOCABULARY, PLACE, SLOT), IndexError),
    "step in one dimension": ((TOKEN[0], PLACE, SLOT), ValueError),
    "step past the last position": ((TOKEN, torch.tensor([[POSITIONS[-1]]]), SLOT), StopIteration),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_is_damaged(model, name):
    expected = alone(model, A, [5, 6], slot=3)
    prefill(model, A, 1)
    arguments, error = REFUSED[name]
    with pytest.raises(error):
        call(model, *arguments)
    assert_same(torch.cat([decode(model, [5], [len(A)], [1]), decode(model, [6], [len(A) + 1], [1])]), expected[1:])


# Construction


BUCKETS = {
    "2048": (2048, None, [128, 256, 512, 1024, 2048], [64, 128, 256, 512, 1024]),
    "3000": (3000, None, [128, 256, 512, 1024, 2048, 3000], [64, 128, 256, 512, 1024, 1500]),
    "128": (128, None, [128], [64]),
    "100": (100, None, [100], [50]),
    "a list is sorted": ([64, 32], [32, 8], [32, 64], [8, 32]),
    "one estimate": (256, 64, [128, 256], [64]),
    "no estimate": (256, 0, [128, 256], []),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets(folder, name):
    positions, estimate, tokens, contexts = BUCKETS[name]
    model = load(folder, n_positions=positions, context_length_estimate=estimate)
    assert model.token_buckets == tokens
    assert model.context_buckets == contexts


def test_batch_sizes_are_sorted(folder):
    assert load(folder, batch_size=[4, 1, 2]).batch_sizes == [1, 2, 4]
    assert load(folder, batch_size=3).batch_sizes == [3]
    with pytest.raises(TypeError):
        load(folder, batch_size=(1, 2))


@pytest.mark.parametrize("batch_size", [2, 5, [4], [2, 4], None])
def test_slots_must_be_the_batch_size(folder, batch_size):
    with pytest.raises(AssertionError):
        load_slots(folder, batch_size=batch_size)


def test_the_batch_size_must_be_given(folder):
    config = NeuronConfig(continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=1))
    with pytest.raises(AssertionError):
        LlamaForSampling.from_pretrained(str(folder), tp_degree=1, neuron_config=config)


@pytest.mark.parametrize("positions, estimate", [(64, 65), ([16, 32], 33), ([16, 32], [8, 64]), (64, [128])])
def test_contexts_cannot_be_longer_than_all_positions(folder, positions, estimate):
    with pytest.raises(AssertionError):
        load(folder, n_positions=positions, context_length_estimate=estimate)


def test_unroll_must_divide_the_layers(folder):
    with pytest.raises(ValueError):
        on_device(load(folder, unroll=3, n_positions=[8], context_length_estimate=[4]))


def test_settings_are_checked():
    with pytest.raises(TypeError):
        NeuronConfig(None)
    with pytest.raises(TypeError):
        GenerationConfig(100)
    with pytest.raises(TypeError):
        GenerationConfig(seed=1)
    with pytest.raises(AssertionError):
        NeuronConfig(continous_batching=None)
    with pytest.raises(AssertionError):
        NeuronConfig(padding_side="both")
    with pytest.raises(AssertionError):
        NeuronConfig(cast_logits_dtype="f32")
    with pytest.raises(AssertionError):
        NeuronConfig(qkv_tiling=True)
    with pytest.raises(ValueError):
        NeuronConfig(group_query_attention="by-chance")
    with pytest.raises(AssertionError):
        ContinuousBatchingConfig(max_num_seqs=4, batch_size_for_shared_caches=4)
    with pytest.raises(AssertionError):
        ContinuousBatchingConfig(max_num_seqs=4, slots=4)
    with pytest.raises(KeyError):
        ContinuousBatchingConfig()


def test_settings_can_be_read_back():
    assert ContinuousBatchingConfig(max_num_seqs=4).batch_size_for_shared_caches == 4
    assert NeuronConfig().padding_side == "left"
    batching = ContinuousBatchingConfig(batch_size_for_shared_caches=4)
    assert NeuronConfig(continuous_batching=batching, padding_side="left").padding_side == "right"
    assert NeuronConfig(group_query_attention="shard-over-heads").group_query_attention is GQA.SHARD_OVER_HEADS
    assert Layout.BSH == "BSH"


def test_the_class_is_found_by_the_model_type(folder, tmp_path):
    model = load(folder, NeuronAutoModelForCausalLM)
    assert type(model) is LlamaForSampling
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with pytest.raises(AssertionError):
        load(write_checkpoint(tmp_path / "qwen", qwen), NeuronAutoModelForCausalLM)


def test_a_folder_without_weights(tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        load(tmp_path)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises((OSError, ValueError)):  # it depends on the version of transformers, and on the folder's name
        load(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_stretched_positions_are_refused(tmp_path, kind):
    scaling = {"type": kind, "rope_type": kind, "factor": 2.0}
    with pytest.raises(ValueError):
        load(write_checkpoint(tmp_path, LLAMA | {"rope_scaling": scaling}))


# The device


def test_forward_needs_the_device(folder):
    model = load_slots(folder)
    assert not model.is_compiled()
    with pytest.raises(ValueError):
        prefill(model, A, 0)


def test_options_that_only_cost_or_save_time(folder, model):
    expected = alone(model, A, [5, 6])
    variants = (
        {"neuron": {"attention_layout": Layout.BSH, "collectives_layout": Layout.BSH, "fuse_qkv": True}},
        {"neuron": {"on_device_embedding": True, "compilation_worker_count": 2}},
    )
    for options in variants:
        assert_same(alone(on_device(load_slots(folder, **options)), A, [5, 6], slot=2), expected)


def test_programs_are_saved_and_loaded(folder, model, tmp_path):
    assert model.is_compiled()
    model.save(str(tmp_path / "compiled"))
    names = sorted(path.name for path in (tmp_path / "compiled").iterdir())
    assert len(names) == len(POSITIONS) + len(CONTEXTS)
    assert all(re.fullmatch("[0-9a-f]{20}[.]neff", name) for name in names)
    loaded = load_slots(folder)
    loaded.load(str(tmp_path / "compiled"))
    loaded.to_neuron()
    assert_same(alone(loaded, A, [5]), alone(model, A, [5]))
    loaded.save(str(tmp_path / "again"))
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names


@pytest.mark.parametrize("unrolls, programs", [((None, None), 2), ((1, None), 3), ((1, 1), 4), ((2, 2), 2)])
def test_layers_in_parts_need_more_programs(folder, model, tmp_path, unrolls, programs):
    context_unroll, unroll = unrolls
    parts = on_device(
        load_slots(folder, n_positions=[8], context_length_estimate=[8], context_unroll=context_unroll, unroll=unroll)
    )
    parts.save(str(tmp_path))
    assert len(list(tmp_path.glob("*.neff"))) == programs
    assert_same(alone(parts, A, [5, 6]), alone(model, A, [5, 6]))


def test_static_programs_are_one_for_each_batch_size(static, tmp_path):
    static.save(str(tmp_path))
    assert len(list(tmp_path.glob("*.neff"))) == 2 * (len(POSITIONS) + len(CONTEXTS))


CHANGES = {
    "n_positions": {"n_positions": [8, 16, 64]},
    "context_length_estimate": {"context_length_estimate": [4, 16, 20]},
    "slots": {"slots": 3},
    "amp": {"amp": "bf16"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_programs_of_another_shape_are_not_found(folder, model, tmp_path, name):
    model.save(str(tmp_path))
    other = load_slots(folder, **CHANGES[name])
    other.load(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        other.to_neuron()


def test_a_folder_of_programs_is_looked_for_when_the_device_is_taken(folder, tmp_path):
    model = load_slots(folder, n_positions=[8], context_length_estimate=[4])
    model.load(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        model.to_neuron()


def test_what_cannot_be_saved(folder, model, tmp_path):
    with pytest.raises(AttributeError):
        load_slots(folder).save(str(tmp_path / "early"))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        model.save(str(tmp_path / "file"))
    with pytest.raises(AssertionError):
        model.save(str(tmp_path / "sharded"), sharded_weights=True)


def test_reset_leaves_a_model_that_works(folder, model):
    expected = alone(model, A, [5])
    model.reset()
    assert_same(alone(model, A, [5]), expected)


# Static batches


def test_a_static_batch(static):
    prompt, pads = torch.tensor([A, [0, 0, *B]]), torch.tensor([0, len(A) - len(B)])
    logits = call(static, prompt, None, pads)
    assert logits.shape == (2, VOCABULARY)
    assert logits.dtype == torch.float32
    one = call(static, torch.tensor([A]), None, zeros(1))
    assert_same(logits[:1], one)
    assert_same(logits[1:], call(static, torch.tensor([B]), None, zeros(1)))
    step = call(static, torch.tensor([[5], [6]]), torch.tensor([len(A)], dtype=torch.int32), pads)
    assert_same(step[1:], call(static, torch.tensor([[*B, 6]]), None, zeros(1)))
    assert_same(step[:1], call(static, torch.tensor([[*A, 5]]), None, zeros(1)))


def test_a_static_batch_has_one_of_the_given_sizes(static):
    with pytest.raises(KeyError):
        call(static, torch.tensor([A] * 3), None, zeros(3))
    with pytest.raises(KeyError):
        call(static, torch.tensor([[5]] * 3), torch.tensor([len(A)]), zeros(3))


def test_a_long_prompt_of_a_static_batch_goes_on_token_by_token(static):
    tokens = text(20, 12)
    logits = call(static, torch.tensor([tokens]), None, zeros(1))
    call(static, torch.tensor([tokens[:16]]), None, zeros(1))
    for position in range(16, 20):
        last = call(static, torch.tensor([tokens[position : position + 1]]), torch.tensor([position]), zeros(1))
    assert_same(logits, last)


def test_the_last_position_of_a_static_batch(static):
    tokens = text(POSITIONS[-1], 13)
    assert call(static, torch.tensor([tokens]), None, zeros(1)).shape == (1, VOCABULARY)
    with pytest.raises(StopIteration):
        call(static, torch.tensor([[5]]), torch.tensor([POSITIONS[-1]]), zeros(1))


def test_positions_of_a_static_batch_have_one_dimension(static):
    for rows, error in ((1, AssertionError), (2, RuntimeError)):
        call(static, torch.tensor([A] * rows), None, zeros(rows))
        with pytest.raises(error):
            call(static, torch.tensor([[5]] * rows), torch.tensor([[len(A)]] * rows), zeros(rows))


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_static_batch_must_look_like(static, rows):
    prompt, places, step = torch.tensor([A] * rows), torch.arange(len(A)), torch.tensor([[5]] * rows)
    call(static, prompt, places, zeros(rows))
    with pytest.raises(AssertionError):
        call(static, prompt, None, zeros(rows)[:, None])
    with pytest.raises(AssertionError):
        call(static, step, torch.tensor([len(A)]), zeros(rows)[:, None])
    for given, error in ((3 - rows, AssertionError), (3, KeyError)):
        with pytest.raises(error):
            call(static, prompt, None, zeros(given))
    with pytest.raises(ValueError):
        call(static, prompt, places + 2, zeros(rows))
    with pytest.raises(IndexError):
        call(static, prompt + VOCABULARY, None, zeros(rows))
    expected = call(static, torch.tensor([[*A, 5]] * rows), None, zeros(rows))
    call(static, prompt, places, zeros(rows))
    assert_same(call(static, step, torch.tensor([len(A)]), zeros(rows)), expected)


def test_a_static_batch_padded_on_the_right(folder, model):
    config = NeuronConfig(padding_side="right")
    right = on_device(load(folder, batch_size=2, neuron_config=config, n_positions=[8], context_length_estimate=[8]))
    expected = torch.stack([alone(model, A, [5])[1], alone(model, B, [6])[1]])
    prompt, rows = torch.tensor([A, [*B, 0, 0]]), torch.arange(2)
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]])
    with pytest.raises(AttributeError):
        call(right, prompt, None, rows)
    with pytest.raises(IndexError):
        call(right, prompt, places[0], rows)
    call(right, prompt, places, rows)
    with pytest.raises(ValueError):
        call(right, torch.tensor([[5], [6]]), torch.tensor([len(A)]), rows)
    assert_same(call(right, torch.tensor([[5], [6]]), torch.tensor([[len(A)], [len(B)]]), rows), expected)


# Sampling on the device


def test_the_device_gives_tokens(model, sampler):
    expected = prefill(model, A, 0).argmax(-1).tolist()
    tokens = prefill(sampler, A, 2)
    assert tokens.shape == (1, 1)
    assert tokens.dtype == torch.int32
    assert tokens.flatten().tolist() == expected
    step = decode(sampler, expected, [len(A)], [2])
    assert step.shape == (1, 1)
    assert step.dtype == torch.int32
    assert step.flatten().tolist() == alone(model, A, expected)[-1:].argmax(-1).tolist()


def test_tokens_of_the_device_do_not_go_with_int64_positions(sampler):
    tokens = prefill(sampler, A, 2)
    with pytest.raises(RuntimeError):
        call(sampler, tokens, torch.tensor([[len(A)]]), torch.tensor([2]))


def test_each_slot_has_its_own_parameters(model, sampler):
    greedy = int(prefill(model, A, 0).argmax())
    new = GenerationConfig(
        do_sample=True, dynamic=True, per_batch_line=True, top_k=[1, VOCABULARY, 1, 1], temperature=[1.0, 50.0, 1.0, 1.0]
    )
    sampler.update_generation_config(new)
    assert {int(prefill(sampler, A, 0)) for _ in range(20)} == {greedy}
    assert len({int(prefill(sampler, A, 1)) for _ in range(20)}) > 5
    sampler.update_generation_config(GenerationConfig(do_sample=True, dynamic=True, per_batch_line=True, top_k=1))
    assert {int(prefill(sampler, A, 1)) for _ in range(20)} == {greedy}


@pytest.mark.parametrize(
    "settings",
    [
        {"per_batch_line": False, "top_k": 1},
        {"per_batch_line": True, "top_k": [1] * (SLOTS - 1)},
        {"per_batch_line": True, "top_p": [1.0] * (SLOTS + 1)},
    ],
)
def test_parameters_that_do_not_fit_are_refused(sampler, settings):
    with pytest.raises(AssertionError):
        sampler.update_generation_config(GenerationConfig(do_sample=True, dynamic=True, **settings))


def test_lists_need_parameters_for_each_slot(folder):
    model = on_device(load_slots(folder, n_positions=[8], context_length_estimate=[4], neuron=sampling(top_k=1)))
    with pytest.raises(AssertionError):
        model.update_generation_config(GenerationConfig(do_sample=True, dynamic=True, top_k=[1] * SLOTS))


def test_fixed_parameters_cannot_be_changed(folder):
    neuron = sampling(dynamic=False, do_sample=False)
    model = on_device(load_slots(folder, n_positions=[8], context_length_estimate=[4], neuron=neuron))
    with pytest.raises(AttributeError):
        model.update_generation_config(GenerationConfig(do_sample=True, top_k=2))


# Other families


def test_mistral_has_slots_up_to_its_window(tmp_path):
    options = {"cls": MistralForSampling, "n_positions": [8, 16], "context_length_estimate": [8]}
    wide = on_device(load_slots(write_checkpoint(tmp_path / "without", MISTRAL), **options))
    tokens = [*A, 5]
    assert_same(alone(wide, A, [5])[1:], prefill(wide, tokens, 1))
    equal = on_device(load_slots(write_checkpoint(tmp_path / "equal", MISTRAL | {"sliding_window": 16}), **options))
    assert prefill(equal, A, 1).shape == (1, VOCABULARY)
    with pytest.raises(AssertionError):
        on_device(load_slots(write_checkpoint(tmp_path / "narrow", MISTRAL | {"sliding_window": 8}), **options))


def test_opt_has_no_slots(tmp_path):
    with pytest.raises(AssertionError):
        on_device(
            load_slots(write_checkpoint(tmp_path, OPT), cls=OPTForSampling, n_positions=[16], context_length_estimate=[8])
        )
