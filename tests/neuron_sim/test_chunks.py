"""Prompts in chunks on the real library: every schedule's greedy text equals transformers' generate."""

import random

import numpy as np
import pytest
import transformers
from fakes.tokenizer import byte_tokenizer
from loop import Driven
from test_server import WINDOW, Batch, as_float32, assert_like, cores, next_tokens, refuse_to_compile, serve  # noqa: F401
from test_simulator import SMALL, VOCABULARY, Reference
from torch_neuronx import simulator
from transformers_neuronx import LlamaForSampling, compiler

from models.base import Chunk
from models.neuron import compile as verb
from protocol import Generate

CHUNK = 8
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama, grouped": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "llama, scaled": lambda: transformers.LlamaConfig(
        **SMALL, rope_theta=500000.0, rope_scaling=ROPE | {"original_max_position_embeddings": 16}
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None, rope_theta=1e6),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mistral, sliding": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=WINDOW),
}
_made = {}


@pytest.fixture
def made(request, tmp_path_factory):
    if request.param not in _made:
        _made[request.param] = Reference(CONFIGS[request.param](), tmp_path_factory.mktemp("checkpoint"))
    return _made[request.param]


def run_chunks(model, slot, prompt, begin=0):
    """What the prompt's last chunk returns."""
    while begin + CHUNK < len(prompt):
        model.forward([Chunk(slot, prompt[begin : begin + CHUNK], begin)])
        begin += CHUNK
    return model.forward([Chunk(slot, prompt[begin:], begin)])


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("made", CONFIGS, indirect=True)
def test_random_arrivals_through_the_scheduler_get_transformers_text_with_chunks_and_without(made, tmp_path, tp_degree):
    chance, requests = random.Random(tp_degree), []
    lengths = [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 1, WINDOW - 1] + [chance.randrange(1, WINDOW) for _ in range(10)]
    for n, length in enumerate(chance.sample(lengths, len(lengths))):
        prompt = [chance.randrange(1, VOCABULARY) for _ in range(length)]
        requests.append(Generate(n, prompt, chance.randrange(1, WINDOW - length + 1), ignore_eos=True))
    for chunk in (CHUNK, 0):
        model = serve(made, tmp_path, max_batch_size=4, tp_degree=tp_degree, prefill_chunk=chunk, position_buckets=(16,))
        assert model.prefill_chunk == model.prefix_granularity == (chunk or None)
        driven = Driven(served=model)
        for request in requests:
            driven.arrive(request)
            for _ in range(chance.randrange(4)):
                if not driven.is_idle or driven.wire.arrivals:
                    driven.step()
        driven.run()
        for request in requests:
            assert len(driven.tokens[request.id]) == request.max_new_tokens
            assert_like(made, request.prompt, [*request.prompt, *driven.tokens[request.id]])


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_a_prompt_may_continue_at_any_position_of_what_its_slot_holds(made, tmp_path, slots):
    """Also of an earlier request, after decode steps of other slots; and up to the end of the slot."""
    model = serve(made, tmp_path, max_batch_size=slots, prefill_chunk=CHUNK, position_buckets=(CHUNK, 16))
    chance, slot = random.Random(0), slots - 1
    held = [chance.randrange(1, VOCABULARY) for _ in range(WINDOW - 1)]
    run_chunks(model, slot, held)
    for begin in [40, 47 - CHUNK, 33, 32, 17, 16, 9, 8, 1]:
        if slots > 1:
            model.forward([Chunk(0, [5, 6], 0)])
            for position in range(2, 20):  # through the bucket that is as long as a chunk
                model.forward([Chunk(0, [7], position)])
        end = chance.choice([begin + 1, begin + 3, WINDOW - 1])
        held = [*held[:begin], *(chance.randrange(1, VOCABULARY) for _ in range(end - begin))]
        logits = run_chunks(model, slot, held, begin)
        assert np.abs(logits[0] - made.logits(held).numpy()).max() < 1e-3
        held.append(9)
        logits = model.forward([Chunk(slot, [9], len(held) - 1)])
        assert np.abs(logits[0] - made.logits(held).numpy()).max() < 1e-3


@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_a_long_text_that_a_slot_holds_costs_the_steps_of_short_ones_nothing(made, tmp_path):
    model = serve(made, tmp_path, max_batch_size=2, prefill_chunk=CHUNK, position_buckets=(16,))
    held = [3 * n + 1 for n in range(40)]
    run_chunks(model, 1, held)
    model.forward([Chunk(0, [5, 6], 0)])
    for position in range(2, 10):
        model.forward([Chunk(0, [7], position)])
        assert simulator.cache_lengths(simulator.executions[-1]) == [16]
    logits = model.forward([Chunk(0, [7], 10), Chunk(1, [9], 40)])
    assert np.abs(logits[1] - made.logits([*held, 9]).numpy()).max() < 1e-3


@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_decode_steps_of_other_slots_change_no_bit_of_a_prompt(made, tmp_path):
    model = serve(made, tmp_path, max_batch_size=2, prefill_chunk=CHUNK, position_buckets=(16,))
    prompt, logits = [5 * n + 2 for n in range(2 * CHUNK - 2)], []
    for steps in (0, 1, 3):
        model.forward([Chunk(0, [5, 6], 0)])
        model.forward([Chunk(1, prompt[:CHUNK], 0)])
        for position in range(2, 2 + steps):
            model.forward([Chunk(0, [7], position)])
        logits.append(model.forward([Chunk(1, prompt[CHUNK:], CHUNK)]))
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_logits_after_every_token_of_a_prompt_are_those_of_transformers(made, tmp_path):
    model = serve(made, tmp_path, max_batch_size=2, prefill_chunk=CHUNK, position_buckets=(16,))
    assert model.supports_prompt_logits
    prompt = [5 * n + 2 for n in range(2 * CHUNK + 3)]
    for length in (1, 2, CHUNK, CHUNK + 1, len(prompt)):
        chunks = [Chunk(1, prompt[begin : begin + CHUNK][: length - begin], begin, True) for begin in range(0, length, CHUNK)]
        logits = np.concatenate([model.forward([chunk]) for chunk in chunks])
        expected = np.stack([made.logits(prompt[: n + 1]).numpy() for n in range(length)])
        assert logits.shape == expected.shape and np.abs(logits - expected).max() < 1e-3


@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_the_device_samples_the_token_after_a_chunk_with_the_parameters_of_its_slot(made, tmp_path):
    model = serve(made, tmp_path, max_batch_size=3, prefill_chunk=CHUNK, position_buckets=(16,), sampling="device", tp_degree=2)
    assert model.prefill_chunk and not model.supports_prompt_logits
    prompt = [7 * n + 3 for n in range(CHUNK + 3)]
    logits, ids = made.logits(prompt).topk(4)
    for slot in range(3):
        model.forward([Chunk(slot, prompt[:CHUNK], 0)])
    model.set_sampling(1, 4, 1.0, 2.0)
    drawn = [next_tokens(model, Chunk(1, prompt[CHUNK:], CHUNK))[0] for _ in range(300)]
    shares = np.array([drawn.count(token) / len(drawn) for token in ids.tolist()])
    assert np.abs(shares - (logits / 2).softmax(-1).numpy()).max() < 0.12 and set(drawn) <= set(ids.tolist())
    for slot in (0, 2):
        assert {next_tokens(model, Chunk(slot, prompt[CHUNK:], CHUNK))[0] for _ in range(5)} == {int(ids[0])}


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", None), ("bfloat16", "int8"), ("float16", None)])
@pytest.mark.parametrize("made", ["llama, grouped"], indirect=True)
def test_rounding_in_16_bits_is_no_difference_at_the_start(made, tmp_path, dtype, quantize, caplog):
    settings = {"dtype": dtype, "quantize": quantize, "max_batch_size": 4}
    model = serve(made, tmp_path, prefill_chunk=CHUNK, position_buckets=(16,), **settings)
    assert model.prefill_chunk == CHUNK and "Chunked prefill is off" not in caplog.text


@pytest.mark.parametrize("wrong", ["slot", "position"])
@pytest.mark.parametrize("made", ["llama, grouped", "qwen3_moe"], indirect=True)
def test_a_chunk_that_goes_to_the_wrong_place_is_noticed_at_the_start(made, tmp_path, monkeypatch, caplog, wrong):
    real = LlamaForSampling.speculative_forward

    def forward(model, ids, positions, slots, speculation_length):
        if wrong == "slot":
            return real(model, ids, positions, slots - 1, speculation_length)
        return real(model, ids, positions - 1, slots, speculation_length)

    monkeypatch.setattr(LlamaForSampling, "speculative_forward", forward)
    batch = Batch(serve(made, tmp_path, max_batch_size=4, prefill_chunk=CHUNK, position_buckets=(16,)))
    assert batch.model.prefill_chunk is None
    assert caplog.text.count("Chunked prefill is off") == 1
    prompt = [5 * n + 2 for n in range(20)]
    batch.join(3, prompt)
    batch.step()
    assert_like(made, prompt, batch.leave(3))


@pytest.mark.parametrize("made", ["mistral"], indirect=True)
def test_a_compiled_folder_has_the_program_of_chunks_and_serves_without_compiling(made, tmp_path, monkeypatch):
    words = ["--max-total-tokens", str(WINDOW), "--tp-degree", "1", "--max-batch-size", "2", "--prefill-chunk", str(CHUNK)]
    byte_tokenizer(made.folder)
    monkeypatch.setattr("logs.set_up", lambda level, as_json: None)
    assert verb.main(["--model-id", str(made.folder), "--output", str(tmp_path / "out"), *words]) == 0
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    settings = {"max_total_tokens": None, "max_input_tokens": None, "dtype": "auto", "tp_degree": None}
    model = serve(made, tmp_path, tmp_path / "out", **settings)
    prompt = [5 * n + 2 for n in range(20)]
    assert model.prefill_chunk == CHUNK
    assert int(as_float32(run_chunks(model, 1, prompt)).argmax()) == int(made.logits(prompt).argmax())
    assert serve(made, tmp_path, tmp_path / "out", **settings, prefill_chunk=0).prefill_chunk is None
