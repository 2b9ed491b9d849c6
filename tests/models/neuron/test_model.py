"""NeuronModel: a request's output is the one that it gets alone; calls that the device would run wrongly are not made."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fakes.tokenizer import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop import Driven, Oracle
from on_neuron import (  # noqa: F401
    CHUNK,
    DEVICE,
    FAMILIES,
    GREEDY,
    LLAMA,
    VOCABULARY,
    WINDOW,
    Batch,
    alone,
    as_float32,
    assert_serves_whole,
    assert_text_alone,
    built,
    checkpoint,
    device,
    fail,
    first_token,
    load,
    load_chunks,
    machine,
    refusal,
    run_chunks,
)
from processes import Server, events

import worker
from models.base import Chunk
from models.errors import DeviceLost
from models.images.encoder_cache import EncoderCache
from models.neuron.model import HostEmbedding
from protocol import Generate

EXECUTION_ERROR = RuntimeError('nrt_execute status=1004 message="Execution error"')
ARRIVALS = st.lists(st.tuples(st.integers(1, WINDOW - 1), st.integers(1, WINDOW), st.integers(0, 4)), min_size=1, max_size=12)


# A batch


@pytest.mark.parametrize("chunk", [CHUNK, 0], ids=["chunks", "whole"])
@pytest.mark.parametrize("sampling", ["host", "device"])
@given(arrivals=ARRIVALS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_schedule_gives_each_request_the_text_that_it_gets_alone(tmp_path, sampling, chunk, arrivals):
    model = load_chunks(tmp_path, sampling=sampling, prefill_chunk=chunk)
    assert model.prefill_chunk == model.prefix_granularity == (chunk or None)
    driven = Driven(served=model)
    requests = []
    for n, (length, count, steps) in enumerate(arrivals):
        prompt = [(7 * n + position) % 90 + 1 for position in range(length)]
        requests.append(Generate(n, prompt, min(count, WINDOW - length), ignore_eos=True))
        driven.arrive(requests[-1])
        for _ in range(steps):
            if not driven.is_idle or driven.wire.arrivals:
                driven.step()
    driven.run()
    for request in requests:
        text = [*request.prompt, *driven.tokens[request.id]]
        assert text == alone(request.prompt, len(request.prompt) + request.max_new_tokens)


@pytest.mark.parametrize("chunk", [CHUNK, 0], ids=["chunks", "whole"])
@pytest.mark.parametrize("sampling", ["host", "device", "hybrid"])
@given(arrivals=ARRIVALS, chance=st.randoms(use_true_random=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_schedule_with_draft_tokens_gives_each_request_the_same_text(tmp_path, sampling, chunk, arrivals, chance):
    model = load_chunks(tmp_path, sampling=sampling, prefill_chunk=chunk, speculate=3)
    assert model.verify_length == 4
    driven, requests = Driven(served=model), []
    for n, (length, count, _steps) in enumerate(arrivals):
        prompt = [(7 * n + position) % 90 + 1 for position in range(length)]
        wanted = {"logprobs": n % 3 == 0 and sampling != "device", "ignore_eos": True}
        requests.append(Generate(n, prompt, min(count, WINDOW - length), **wanted))
    texts = [alone(each.prompt, len(each.prompt) + each.max_new_tokens)[len(each.prompt) :] for each in requests]
    with pytest.MonkeyPatch.context() as patch:
        oracles = iter([Oracle(text, chance) for text in texts])
        patch.setattr(worker, "NgramProposer", lambda *_: next(oracles))
        for request, (_length, _count, steps) in zip(requests, arrivals):
            driven.arrive(request)
            for _ in range(steps):
                if not driven.is_idle or driven.wire.arrivals:
                    driven.step()
        driven.run()
    assert [driven.tokens[request.id] for request in requests] == texts


@pytest.mark.parametrize("sampling", ["host", "device", "hybrid"])
def test_draft_tokens_that_the_device_verifies_wrongly_are_left_out_with_a_warning(tmp_path, monkeypatch, caplog, sampling):
    real = device.LlamaForSampling.speculative_forward

    def wrong(model, ids, positions, slots, speculation_length):
        return real(model, ids.flip(1) if len(slots) > 1 else ids, positions, slots, speculation_length)

    monkeypatch.setattr(device.LlamaForSampling, "speculative_forward", wrong)
    model = load_chunks(tmp_path, sampling=sampling, speculate=3)
    assert (model.verify_length, model.max_draft_rows) == (0, 0) and model.prefill_chunk
    assert "Speculative decoding is off (--speculate): " in caplog.text


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_the_other_families_run_in_a_batch_too(tmp_path, family):
    batch = Batch(load(tmp_path, FAMILIES[family], max_batch_size=4))
    batch.join(0, [5, 6, 7])
    batch.step()
    batch.join(2, [8])
    batch.step()
    assert_text_alone(batch, 0, [5, 6, 7])
    while len(batch.texts[2]) < WINDOW:
        batch.step()
    assert_text_alone(batch, 2, [8])


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slot_keeps_what_it_holds_until_another_prompt_starts_there(tmp_path, data):
    """Prompts continue at any position of what their slot holds, while other slots decode and are left."""
    batch, held, lengths = Batch(load_chunks(tmp_path)), {}, {}

    def leave(slot):
        text = batch.leave(slot)
        assert text == alone(text[: lengths[slot]], len(text))
        held[slot] = text[:-1]  # the last token has not been run

    for n in range(data.draw(st.integers(2, 12))):
        slot = data.draw(st.integers(0, 3))
        if slot in batch.texts:
            leave(slot)
        begin = data.draw(st.integers(0, min(len(held.get(slot, [])), WINDOW - 2)))
        new = data.draw(st.integers(1, WINDOW - 1 - begin))
        prompt = [*held.get(slot, [])[:begin], *([n + 1] * new)]
        logits = run_chunks(batch.model, slot, prompt, begin)
        assert int(as_float32(logits).argmax()) == alone(prompt, len(prompt) + 1)[-1]
        batch.texts[slot], lengths[slot] = alone(prompt, len(prompt) + 1), len(prompt)
        for _ in range(data.draw(st.integers(0, 3))):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                leave(full)
            if batch.texts:
                batch.step()
    for slot in list(batch.texts):
        leave(slot)


def test_a_free_slot_holds_its_tokens_beside_the_steps_of_others(tmp_path):
    batch = Batch(load_chunks(tmp_path))
    batch.join(0, [5, 6, 7])
    held = batch.leave(0)[:-1]
    batch.join(2, [8])
    for _ in range(3):
        batch.step()
    logits = run_chunks(batch.model, 0, [*held, 9], len(held))
    assert int(as_float32(logits).argmax()) == alone([*held, 9], len(held) + 2)[-1]
    batch.step()
    assert_text_alone(batch, 2, [8])


@pytest.mark.parametrize("begin", [WINDOW - CHUNK, WINDOW - 3, WINDOW - 2])
def test_a_prompt_may_continue_near_the_end_of_its_slot(tmp_path, begin):
    model = load_chunks(tmp_path)
    prompt = list(range(1, WINDOW))
    run_chunks(model, 1, prompt)
    logits = run_chunks(model, 1, prompt, begin)
    assert int(as_float32(logits).argmax()) == alone(prompt, WINDOW)[-1]


@pytest.mark.parametrize("chunk", [CHUNK, 0], ids=["chunks", "whole"])
def test_a_slot_that_a_step_does_not_name_keeps_its_tokens(tmp_path, chunk):
    batch = Batch(load_chunks(tmp_path, prefill_chunk=chunk))
    batch.join(0, [5, 6])
    batch.join(1, [7, 8, 9])
    idle = batch.leave(1)
    for _ in range(5):
        batch.step()
    batch.texts[1] = idle
    batch.step()
    assert_text_alone(batch, 0, [5, 6])
    assert_text_alone(batch, 1, [7, 8, 9])


def test_steps_that_the_library_would_silently_run_wrongly_are_refused(tmp_path):
    model = load(tmp_path, max_batch_size=2)
    for slot in (0, 1):
        model.forward([Chunk(slot, [5, 6], 0)])
    for chunks in (
        [Chunk(0, [1], 1), Chunk(1, [1], 2)],  # not the next position
        [Chunk(0, [1], 3), Chunk(1, [1], 2)],
        [Chunk(1, [1], 2), Chunk(0, [1], 2)],  # not in the order of the slots
        [Chunk(0, [1], 2), Chunk(0, [1], 2)],
        [Chunk(0, [1, 2], 2), Chunk(1, [1], 2)],  # several tokens
        [Chunk(0, [5, 6], 0), Chunk(1, [1], 2)],  # a prompt beside a step
    ):
        with pytest.raises((AssertionError, ValueError)):
            model.forward(chunks)
    model.forward([Chunk(0, [1], 2), Chunk(1, [1], 2)])


def test_a_prompt_cannot_continue_behind_what_its_slot_holds(tmp_path):
    model = load_chunks(tmp_path)
    run_chunks(model, 1, [5] * 6)
    for chunk in (Chunk(1, [7, 8], 7), Chunk(0, [7, 8], 4), Chunk(1, [7] * (CHUNK + 1), 4), Chunk(1, [7, 8], WINDOW - 2)):
        with pytest.raises(AssertionError):
            model.forward([chunk])
    run_chunks(model, 1, [5] * 8, 6)


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK + 2, WINDOW - 1])
def test_logits_after_every_token_of_a_prompt(tmp_path, length):
    model = load_chunks(tmp_path)
    prompt = list(range(1, length + 1))
    assert model.supports_prompt_logits and not load_chunks(tmp_path, prefill_chunk=0).supports_prompt_logits
    for begin in range(0, length, CHUNK):
        chunk = Chunk(2, prompt[begin : begin + CHUNK], begin, all_logits=True)
        expected = [device.expected_logits(prompt[: n + 1], VOCABULARY) for n in range(begin, begin + len(chunk.tokens))]
        assert np.array_equal(as_float32(model.forward([chunk])), np.stack(expected))


@pytest.mark.parametrize("program", ["prompt", "step"])
def test_an_error_of_the_device_means_that_it_is_lost(tmp_path, monkeypatch, program):
    batch = Batch(load(tmp_path, max_batch_size=2))
    batch.join(0, [5, 6])
    fail(monkeypatch, "__call__", EXECUTION_ERROR, lambda model, ids, *_: (ids.shape[1] == 1) == (program == "step"))
    with pytest.raises(DeviceLost, match="status=1004"):
        batch.step()
        batch.join(1, [7, 8])


# Sampling on the device


@pytest.fixture
def updates(monkeypatch):
    """Every update of the device's sampling parameters: top_k, top_p and temperature of each slot."""
    seen = []
    update = device.LlamaForSampling.update_generation_config

    def listen(model, new):
        seen.append(list(zip(new.top_k, new.top_p, new.temperature)))
        update(model, new)

    monkeypatch.setattr(device.LlamaForSampling, "update_generation_config", listen)
    return seen


def test_the_device_is_updated_only_when_the_parameters_of_a_slot_change(tmp_path, updates):
    batch = Batch(load(tmp_path, max_batch_size=2, sampling="device"))
    batch.join(0, [5, 6])
    batch.join(1, [7, 8], (9, 0.7, 2.0))
    batch.step()
    batch.join(1, [9], (9, 0.7, 2.0))
    assert updates == [[GREEDY, (9, 0.7, 2.0)]]
    batch.join(1, [9])
    assert updates[1:] == [[GREEDY, GREEDY]]
    assert_text_alone(batch, 0, [5, 6])


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ((1, 0.5, 9.0), GREEDY),
        ((0, 0.5, 0.009), GREEDY),
        ((5, 0.5, 1e-300), GREEDY),
        ((5, 0.5, 0.01), (5, 0.5, 0.01)),
        ((0, 1.0, 1.0), (256, 1.0, 1.0)),
        ((256, 1.0, 1.0), (256, 1.0, 1.0)),
        ((5, 1e-30, 1e300), (5, 1e-30, 10000.0)),
    ],
)
def test_parameters_are_brought_within_the_bounds_of_the_device(tmp_path, updates, requested, expected):
    model = load(tmp_path, LLAMA | {"vocab_size": 300}, max_batch_size=2, sampling="device")
    model.set_sampling(0, 7, 1.0, 7.0)
    model.set_sampling(0, *requested)
    assert updates[1] == [expected, GREEDY]
    assert 0 <= first_token(model, 0, [5, 6]) < 300


def test_with_a_small_vocabulary_the_device_samples_from_all_of_it(tmp_path, updates, built):  # noqa: F811
    load(tmp_path, LLAMA | {"vocab_size": 100}, sampling="device").set_sampling(0, 256, 1.0, 1.0)
    assert built[0].on_device_generation.global_top_k == 100 and updates[0][0] == (100, 1.0, 1.0)


def test_a_model_for_prompts_of_one_token_starts_with_draft_tokens(tmp_path):
    model = load(tmp_path, max_total_tokens=3, max_input_tokens=1, max_batch_size=2, speculate=1)
    assert model.verify_length == 2


def test_a_model_for_prompts_of_one_token_starts_with_hybrid_sampling(tmp_path):
    batch = Batch(load(tmp_path, max_total_tokens=2, max_input_tokens=1, max_batch_size=2))
    assert batch.model.sampling == "hybrid"
    batch.join(1, [5])
    assert_text_alone(batch, 1, [5])


def test_a_device_whose_ids_are_not_the_likeliest_leaves_the_choice_to_the_host(tmp_path, monkeypatch, caplog):
    sample = device.LlamaForSampling._sample
    monkeypatch.setattr(device.LlamaForSampling, "_sample", lambda model, logits, slot: sample(model, -logits, slot))
    batch = Batch(load(tmp_path, max_batch_size=2))
    assert batch.model.sampling == "host"
    assert "On-device sampling is off (--sampling): the device chose token" in caplog.text
    batch.join(1, [5, 6])
    batch.step()
    assert_text_alone(batch, 1, [5, 6])


def test_a_device_that_fails_during_an_update_is_lost(tmp_path, monkeypatch):
    model = load(tmp_path, max_batch_size=2, sampling="device")
    fail(monkeypatch, "update_generation_config", IndexError())
    with pytest.raises(DeviceLost):
        model.set_sampling(0, 5, 1.0, 1.0)


@pytest.mark.parametrize(
    ("family", "rows", "kept"), [("llama", 0, True), ("llama", 1, False), ("mixtral", 1, True), ("mixtral", 2, False)]
)
def test_one_result_of_a_mixture_of_experts_may_differ_where_rounding_swaps_experts(tmp_path, monkeypatch, family, rows, kept):
    real = device.LlamaForSampling.speculative_forward

    def swapped(model, ids, positions, slots, speculation_length):
        ids = ids.clone()
        ids[:, 2 - rows :] += 1  # each of two rows is a function of the tokens up to it
        return real(model, ids, positions, slots, speculation_length)

    monkeypatch.setattr(device.LlamaForSampling, "speculative_forward", swapped)
    model = load_chunks(tmp_path, config=FAMILIES[family], sampling="host", speculate=1, prefill_chunk=0)
    assert (model.verify_length == 2) == kept


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_logits_after_a_chunk_of_a_mixture_of_experts_may_differ_alone(tmp_path, monkeypatch, family):
    real = device.LlamaForSampling.speculative_forward
    monkeypatch.setattr(
        device.LlamaForSampling, "speculative_forward", lambda *given, **options: real(*given, **options).roll(1, 1)
    )
    model = load_chunks(tmp_path, config=FAMILIES[family], sampling="host")
    assert (model.prefill_chunk == CHUNK) == (family == "mixtral")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"sampling": "host"}, {"prefill_chunk": 0}], ids=str)
def test_a_model_whose_logits_are_no_numbers_is_refused_at_the_start(tmp_path, monkeypatch, caplog, settings, value):
    output = device.LlamaForSampling._output

    def spoilt(model, places):
        found = output(model, places)
        return found.fill_(value) if model._takes_logits else found.zero_()  # as the device samples from NaN

    monkeypatch.setattr(device.LlamaForSampling, "_output", spoilt)
    message = refusal(tmp_path, max_batch_size=4, **{"prefill_chunk": CHUNK, "speculate": 3} | settings)
    assert "/model computes logits that are NaN or infinite in bfloat16" in message and "--dtype (DTYPE)" in message
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # no part is turned off first


# When chunks are turned off


def wrong_slot(real, model, ids, positions, slots, speculation_length):
    return real(model, ids, positions, (slots + 1) % 4, speculation_length)


def wrong_tokens(real, model, ids, positions, slots, speculation_length):
    return real(model, ids.flip(1), positions, slots, speculation_length)


def no_logits(real, model, ids, positions, slots, speculation_length):
    return real(model, ids, positions, slots, speculation_length).fill_(float("nan"))


def no_program(real, model, ids, positions, slots, speculation_length):
    raise RuntimeError("1th input shape mismatch")


@pytest.mark.parametrize("wrong", [wrong_slot, wrong_tokens, no_logits, no_program])
def test_chunks_that_give_other_logits_than_the_whole_prompt_are_turned_off_at_the_start(tmp_path, monkeypatch, caplog, wrong):
    real = device.LlamaForSampling.speculative_forward
    monkeypatch.setattr(
        device.LlamaForSampling,
        "speculative_forward",
        lambda model, *arguments, **options: wrong(real, model, *arguments, **options),
    )
    assert_serves_whole(load_chunks(tmp_path), caplog)


def test_the_program_of_chunks_runs_at_the_start_also_where_the_longest_prompt_has_one_token_more(tmp_path, monkeypatch):
    calls = []
    fail(monkeypatch, "speculative_forward", None, lambda model, ids, *_, **__: calls.append(ids.shape))
    assert load_chunks(tmp_path, max_input_tokens=CHUNK + 1).prefill_chunk == CHUNK
    assert calls == [(1, CHUNK)]


def test_a_device_that_fails_in_a_chunk_at_the_start_ends_it_with_the_setting_to_change(tmp_path, monkeypatch):
    fail(monkeypatch, "speculative_forward", EXECUTION_ERROR)
    message = refusal(tmp_path, max_batch_size=4, prefill_chunk=CHUNK)
    assert message.startswith("Chunked prefill fails on the device") and message.endswith("give --prefill-chunk 0")


@pytest.mark.parametrize("error", [EXECUTION_ERROR, RuntimeError("1th input shape mismatch")])
def test_a_device_that_fails_at_the_start_in_the_prompt_that_chunks_are_compared_with_is_lost(tmp_path, monkeypatch, error):
    fail(monkeypatch, "__call__", error, lambda model, ids, *_: ids.shape[1] > CHUNK)
    with pytest.raises(DeviceLost, match=str(error)):
        load_chunks(tmp_path)


# The whole server


@pytest.mark.processes
def test_a_server_whose_device_samples_gives_concurrent_streams_their_own_texts(tmp_path):
    folder = checkpoint(tmp_path / "model")
    tokenizer = byte_tokenizer(folder)
    flags = ("--device", "neuron", "--sampling", "device", "--max-total-tokens", "60", "--max-batch-size", "4")
    environment = {"PYTHONPATH": ":".join(DEVICE), "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    with Server("--model-id", str(folder), *flags, **environment) as server:
        server.wait_ready()
        info = json.loads(server.get("/info")[1])
        assert (info["model_device_type"], info["sampling"]) == ("neuron", "device")
        noise = {"inputs": "zz", "parameters": {"temperature": 3.0, "top_k": 200, "max_new_tokens": 50}}
        sampled = [server.request("POST", "/generate_stream", noise) for _ in range(2)]
        texts = ("a", "bc", "d" * 40, "e", "fgh")
        streams = [server.request("POST", "/generate_stream", {"inputs": text}) for text in texts]
        for text, stream in zip(texts, streams):
            tokens = [event["token"] for event in events(stream)]
            prompt = tokenizer.encode(text).ids
            expected = alone(prompt, len(prompt) + len(tokens))[len(prompt) :]
            assert [token["id"] for token in tokens] == expected
            assert {token["logprob"] for token in tokens} == {None}
        assert len({list(events(stream))[-1]["generated_text"] for stream in sampled}) == 2
        server.wait_idle()
        assert server.stop() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_image_tokens_are_looked_up_in_the_encoder_cache_and_scaled_as_the_table_is(dtype):
    table = torch.nn.Embedding(5, 2, dtype=dtype)
    cache = EncoderCache(2)
    cache.add(3, np.array([[1, 2], [4, 8]], np.float32))
    image = -1 - (3 << 16)
    found = HostEmbedding(table, cache, scale=12.0)(torch.tensor([[4, image], [image - 1, 0]]))
    assert found.dtype == dtype and found.shape == (2, 2, 2)
    assert found[0, 0].equal(table.weight[4]) and found[1, 1].equal(table.weight[0])
    assert found[0, 1].tolist() == [12, 24] and found[1, 0].tolist() == [48, 96]


def test_a_slot_keeps_the_embeddings_of_its_images_until_another_prompt_takes_it(tmp_path):
    model = load_chunks(tmp_path)
    model.encoder_cache = cache = EncoderCache(2, limit_bytes=0)
    image = -1 - (3 << 16)
    prompt = [1, image, image - 1, 4, 5]
    model.forward([Chunk(2, prompt[:4], 0)])
    cache.add(3, np.zeros((2, 2), np.float32))
    model.forward([Chunk(2, prompt[4:], 4)])
    model.forward([Chunk(1, [6], 0)])
    assert 3 in cache
    model.forward([Chunk(2, [1, 7], 0)])
    assert 3 not in cache
