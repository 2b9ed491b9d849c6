"""What transformers-neuronx does with the calls that neuron/model.py makes, as tests that the library and the simulated device
of fakes/neuron both pass.

`make test` runs them on the device (models/neuron/test_contract.py), `make test-neuron` on the library. Only the library's own
interface is used.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers_neuronx import ContinuousBatchingConfig, GenerationConfig, LlamaForSampling, NeuronConfig

VOCABULARY = 64
SLOTS = 4
CHUNK = 4
POSITIONS = [8, 16, 32]
CONTEXTS = [4, 8, 16]
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


def write_checkpoint(folder: Path) -> Path:
    """config.json, and random weights of Llama's names and shapes."""
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden)}
    norms = ["model.norm"]
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{letter}_proj": (hidden, hidden) for letter in "qkvo"}
        shapes |= {f"{name}.mlp.{matrix}_proj": (inner, hidden) for matrix in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (hidden, inner)
        norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
    weights = {f"{name}.weight": torch.randn(*shape, generator=random) * 0.3 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder, chunk=0, neuron=None, **options):
    """A model that is not on the device yet."""
    config = NeuronConfig(
        continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=SLOTS),
        **{"cast_logits_dtype": "float32"} | (neuron or {}),
    )
    settings = {"tp_degree": 1, "amp": "f32", "n_positions": POSITIONS, "context_length_estimate": CONTEXTS}
    model = LlamaForSampling.from_pretrained(str(folder), batch_size=SLOTS, neuron_config=config, **settings | options)
    if chunk:
        model.decoder_lm_head_for_speculation[chunk, 1] = model.decoder_param_set.init_speculative_decoder(
            unroll=model.unroll,
            buckets=[size for size in model.token_buckets if size > chunk],
            model_obj=model,
            n_active_tokens=chunk,
            batch_size=1,
        )
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    """Tests share it: each begins with prompts in the slots that it uses."""
    model = load(folder, CHUNK)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def sampler(folder):
    """The device draws the tokens, with parameters of their own for each slot."""
    model = load(folder, neuron={"on_device_generation": generation([1] * SLOTS)})
    model.to_neuron()
    return model


def generation(top_k):
    lines = {"top_k": top_k, "top_p": [1.0] * SLOTS, "temperature": [50.0] * SLOTS}
    return GenerationConfig(do_sample=True, dynamic=True, per_batch_line=True, global_top_k=VOCABULARY, **lines)


@torch.inference_mode()
def prefill(model, prompt, slot):
    return model(torch.tensor([prompt]), torch.arange(len(prompt))[None], torch.tensor([slot]))


@torch.inference_mode()
def decode(model, tokens, positions, slots):
    return model(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], torch.tensor(slots))


@torch.inference_mode()
def chunk(model, tokens, begin, slot):
    positions = torch.arange(begin, begin + CHUNK)[None]
    return model.speculative_forward(torch.tensor([tokens]), positions, torch.tensor([slot]), speculation_length=CHUNK)


def alone(model, prompt, fed, slot=0):
    """The logits after `prompt` and after each of the tokens `fed` to it, with no other slot in use: [1 + fed, vocab]."""
    rows = [prefill(model, prompt, slot)]
    rows += [decode(model, [token], [len(prompt) + n], [slot]) for n, token in enumerate(fed)]
    return torch.cat(rows)


def assert_same(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


def text(length, seed):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = text(5, 1), text(3, 2), text(9, 3)


def test_logits_are_float32_on_the_host_with_a_row_for_each_named_slot(model):
    for logits, rows in ((prefill(model, A, 1), 1), (decode(model, [7, 8], [len(A), 0], [1, 3]), 2)):
        assert logits.shape == (rows, VOCABULARY)
        assert logits.dtype == torch.float32 and logits.device.type == "cpu" and not logits.requires_grad


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


def test_one_that_joins_and_one_that_leaves_do_not_disturb_the_others(model):
    fed = text(12, 4)
    expected_a, expected_c = alone(model, A, fed), alone(model, C, fed[4:8], slot=2)
    found_a = [prefill(model, A, 0)]
    found_a += [decode(model, [fed[n]], [len(A) + n], [0]) for n in range(4)]
    found_c = [prefill(model, C, 3)]
    for n in range(4, 8):
        both = decode(model, [fed[n]] * 2, [len(C) + n - 4, len(A) + n], [3, 0])
        found_c.append(both[:1])
        found_a.append(both[1:])
    found_a += [decode(model, [fed[n]], [len(A) + n], [0]) for n in range(8, 12)]
    assert_same(torch.cat(found_a), expected_a)
    assert_same(torch.cat(found_c), expected_c)


@pytest.mark.parametrize("former", [2, 6, 16])
def test_a_slot_shows_nothing_of_the_one_before(model, former):
    fed = text(20, 6)
    expected = alone(model, A, fed, slot=0)
    alone(model, text(former, 7), text(10, 8), slot=1)
    assert_same(alone(model, A, fed, slot=1), expected)


def test_logits_that_were_given_do_not_change_later(model):
    first = prefill(model, A, 0)
    second = decode(model, [5], [len(A)], [0])
    copies = first.clone(), second.clone()
    decode(model, [6], [len(A) + 1], [0])
    assert torch.equal(first, copies[0]) and torch.equal(second, copies[1])


def test_a_prompt_of_one_token_goes_as_two_with_position_0_twice(model):
    expected = alone(model, A, [7])
    prefill(model, A, 0)
    one = model(torch.tensor([[21, 0]]), torch.tensor([[0, 0]]), torch.tensor([2]))
    assert one.shape == (1, VOCABULARY)
    both = decode(model, [7, 22], [len(A), 1], [0, 2])
    assert_same(both[0], expected[1])
    assert_same(both[1], prefill(model, [21, 22], 1)[0])


def test_a_decode_step_damages_each_slot_that_it_does_not_name(model):
    expected = alone(model, A, [5])
    prefill(model, A, 2)
    decode(model, [7], [0], [1])
    assert (decode(model, [5], [len(A)], [2]) - expected[1:]).abs().max() > 1e-2


def test_all_slots_can_be_named_with_free_ones_at_position_0(model):
    expected = alone(model, A, [5, 6])
    prefill(model, A, 2)
    found = [decode(model, [0, 0, token, 0], [0, 0, len(A) + n, 0], [0, 1, 2, 3])[2] for n, token in enumerate([5, 6])]
    assert_same(torch.stack(found), expected[1:])


@pytest.mark.parametrize("filler", [(9, len(C)), (C[0], 0)], ids=["behind its tokens", "its first token again"])
def test_a_slot_keeps_its_tokens_beside_a_step_that_gives_it_a_filler(model, filler):
    expected = alone(model, C, [5])
    prefill(model, C, 3)
    prefill(model, B, 0)
    decode(model, [6, filler[0]], [len(B), filler[1]], [0, 3])
    assert_same(decode(model, [5], [len(C)], [3]), expected[1:])


def test_every_position_up_to_the_last_can_be_decoded(model):
    tokens = text(POSITIONS[-1], 10)
    logits = alone(model, tokens[:2], tokens[2:])
    assert len(logits) == POSITIONS[-1] - 1
    assert_same(logits[: CONTEXTS[-1] - 1], torch.cat([prefill(model, tokens[: n + 1], 1) for n in range(1, CONTEXTS[-1])]))


@pytest.mark.parametrize("begin", [1, CHUNK, 7, POSITIONS[-1] - CHUNK])
def test_a_chunk_continues_a_slot_at_any_position_with_logits_after_each_token(model, begin):
    tokens = text(POSITIONS[-1], 11)
    expected = alone(model, tokens[:2], tokens[2:])
    alone(model, tokens[:2], tokens[2:begin], slot=1)
    logits = chunk(model, tokens[begin : begin + CHUNK], begin, 1)
    assert logits.shape == (CHUNK, VOCABULARY, 1)
    assert_same(logits[:, :, 0], expected[begin - 1 : begin - 1 + CHUNK])


def test_a_chunk_disturbs_no_other_slot_and_its_fillers_are_written_again(model):
    expected_a, expected_c = alone(model, A, [5]), alone(model, C, [6])
    prefill(model, A, 0)
    prefill(model, C[:7], 2)
    chunk(model, [*C[7:], 0, 0], 7, 2)
    both = decode(model, [5, 6], [len(A), len(C)], [0, 2])
    assert_same(both, torch.stack([expected_a[1], expected_c[1]]))


def test_programs_are_saved_and_loaded(folder, model, tmp_path):
    model.save(str(tmp_path / "compiled"))
    names = sorted(path.name for path in (tmp_path / "compiled").iterdir())
    assert all(re.fullmatch("[0-9a-f]{20}[.]neff", name) for name in names)
    loaded = load(folder, CHUNK)
    loaded.load(str(tmp_path / "compiled"))
    loaded.to_neuron()
    assert_same(alone(loaded, A, [5]), alone(model, A, [5]))


CHANGES = {
    "n_positions": {"n_positions": [8, 16, 64]},
    "context_length_estimate": {"context_length_estimate": [4, 16, 20]},
    "amp": {"amp": "bf16"},
    "chunk": {"chunk": CHUNK + 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_programs_of_another_shape_are_not_found(folder, model, tmp_path, change):
    model.save(str(tmp_path))
    other = load(folder, **{"chunk": CHUNK} | change)
    other.load(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        other.to_neuron()


def test_the_device_gives_tokens(model, sampler):
    expected = prefill(model, A, 0).argmax(-1).tolist()
    tokens = prefill(sampler, A, 2)
    assert tokens.shape == (1, 1) and tokens.dtype == torch.int32
    assert tokens.flatten().tolist() == expected
    step = decode(sampler, expected, [len(A)], [2])
    assert step.flatten().tolist() == alone(model, A, expected)[-1:].argmax(-1).tolist()


def test_each_slot_has_its_own_parameters_until_they_are_updated(model, sampler):
    greedy = int(prefill(model, A, 0).argmax())
    sampler.update_generation_config(generation([1, VOCABULARY, 1, 1]))
    assert {int(prefill(sampler, A, 0)) for _ in range(20)} == {greedy}
    assert len({int(prefill(sampler, A, 1)) for _ in range(20)}) > 5
    sampler.update_generation_config(generation([1] * SLOTS))
    assert {int(prefill(sampler, A, 1)) for _ in range(20)} == {greedy}
