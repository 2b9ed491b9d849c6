"""Prompts in chunks on the fake of transformers-neuronx: texts, what slots hold, and when chunks are turned off."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop import Driven
from test_neuron_model import (  # noqa: F401
    FAMILIES,
    LLAMA,
    WINDOW,
    Batch,
    alone,
    checkpoint,
    compiled,
    fake,
    load,
    machine,
    neuron,
    refusal,
    serve,
    transformers_neuronx,
    verb,
)

from models.artifact import Artifact
from models.base import Chunk, ModelError
from protocol import Generate
from run import ConfigError

CHUNK = 4
OFF = "Prompts are not run in chunks"


def load_chunks(tmp_path, **given):
    return load(tmp_path, **{"max_batch_size": 4, "prefill_chunk": CHUNK, "position_buckets": (2, CHUNK, 8)} | given)


def run_chunks(model, slot, prompt, begin=0):
    """What the prompt's last chunk returns."""
    while begin + CHUNK < len(prompt):
        model.forward([Chunk(slot, prompt[begin : begin + CHUNK], begin)])
        begin += CHUNK
    return model.forward([Chunk(slot, prompt[begin:], begin)])


def as_float32(logits):
    return (logits.astype(np.uint32) << 16).view(np.float32)


ARRIVALS = st.lists(st.tuples(st.integers(1, WINDOW - 1), st.integers(1, WINDOW), st.integers(0, 4)), min_size=1, max_size=12)


@pytest.mark.parametrize("sampling", ["host", "device"])
@given(arrivals=ARRIVALS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_schedule_gives_each_request_the_text_that_it_gets_alone(tmp_path, sampling, arrivals):
    fake.restart()
    model = load_chunks(tmp_path, sampling=sampling)
    assert model.prefill_chunk == model.prefix_step == CHUNK
    driven, requests = Driven(served=model), []
    for n, (length, count, steps) in enumerate(arrivals):
        prompt = [(7 * n + position) % 90 + 1 for position in range(length)]
        requests.append(Generate(n, prompt, min(count, WINDOW - length), ignore_eos=True))
        driven.arrive(requests[-1])
        for _ in range(steps):
            if not driven.worker.is_idle or driven.wire.arrivals:
                driven.step()
    driven.run()
    for request in requests:
        text = [*request.prompt, *driven.tokens[request.id]]
        assert text == alone(request.prompt, len(request.prompt) + request.max_new_tokens)


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slot_keeps_what_it_holds_until_another_prompt_starts_there(tmp_path, data):
    """Prompts continue at any position of what their slot holds, while other slots decode and are left."""
    fake.restart()
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


def test_a_prompt_cannot_continue_behind_what_its_slot_holds(tmp_path):
    model = load_chunks(tmp_path)
    run_chunks(model, 1, [5] * 6)
    for chunk in (Chunk(1, [7, 8], 7), Chunk(0, [7, 8], 4), Chunk(1, [7] * (CHUNK + 1), 4), Chunk(1, [7, 8], WINDOW - 2)):
        with pytest.raises(AssertionError):
            model.forward([chunk])
    run_chunks(model, 1, [5] * 8, 6)


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK + 2, WINDOW - 1])
def test_logits_after_every_token_of_a_prompt(tmp_path, length):
    model, prompt = load_chunks(tmp_path), list(range(1, length + 1))
    assert model.gives_prompt_logits and not load_chunks(tmp_path, prefill_chunk=0).gives_prompt_logits
    fake.restart()
    model = load_chunks(tmp_path)
    for begin in range(0, length, CHUNK):
        chunk = Chunk(2, prompt[begin : begin + CHUNK], begin, keep_all=True)
        logits = as_float32(model.forward([chunk]))
        expected = [fake.expected_logits(prompt[: n + 1], LLAMA["vocab_size"]) for n in range(begin, begin + len(chunk.tokens))]
        assert np.array_equal(logits, np.stack(expected))


@pytest.mark.parametrize("given", [{}, {"prefill_chunk": WINDOW - 1}])
def test_chunks_that_no_prompt_is_longer_than_are_not_compiled(tmp_path, given):
    assert load(tmp_path, prefill_chunk=0).prefill_chunk is None
    programs = len(fake.compiles)
    fake.restart()
    assert load(tmp_path, max_input_tokens=WINDOW - 1, **given).prefill_chunk is None
    assert len(fake.compiles) <= programs


def test_the_default_is_128_tokens(tmp_path):
    settings = {"max_total_tokens": 300, "max_input_tokens": 299, "max_batch_size": 2}
    assert load(tmp_path, LLAMA | {"max_position_embeddings": 300}, **settings).prefill_chunk == 128


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "mistral"}))
def test_chunks_are_refused_by_name_for_families_without_them(tmp_path, family):
    assert load(tmp_path, FAMILIES[family], prefill_chunk=0).prefill_chunk is None
    assert refusal(tmp_path, FAMILIES[family], prefill_chunk=CHUNK) == (
        f"--prefill-chunk {CHUNK} (PREFILL_CHUNK) is not supported for {family} models on Neuron; give 0"
    )


# When chunks are turned off


def assert_serves(model, caplog, warnings):
    assert model.prefill_chunk is None and model.prefix_step is None and not model.gives_prompt_logits
    assert caplog.text.count(OFF) == warnings
    batch = Batch(model)
    batch.join(0, [5] * 10)
    batch.step()
    batch.join(1, [6] * 3)
    batch.step()
    assert batch.leave(0) == alone([5] * 10, 13)


def test_a_compiler_that_refuses_the_program_turns_chunks_off_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "speculation")
    assert_serves(load_chunks(tmp_path), caplog, warnings=1)
    assert "neuronx-cc failed with exit code 70" in caplog.text


def test_a_program_that_the_compiler_refused_is_not_tried_again_by_the_next_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "speculation")
    load_chunks(tmp_path)
    fake.restart()
    caplog.clear()
    assert_serves(load_chunks(tmp_path), caplog, warnings=1)
    assert not fake.compiles and "compiling for them has failed; remove " in caplog.text


def test_a_folder_is_compiled_without_the_program_that_the_compiler_refuses(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "speculation")
    output = compiled(tmp_path, "--prefill-chunk", str(CHUNK), "--max-batch-size", "2")
    assert Artifact.read(output).programs.prefill_chunk == 0
    monkeypatch.delenv("FAKE_NEURON_FAIL")
    assert_serves(serve(output), caplog, warnings=1)


def test_a_device_that_fails_is_no_reason_to_compile_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "oom")
    with pytest.raises(ModelError, match="too little memory"):
        load_chunks(tmp_path)
    assert OFF not in caplog.text


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
    monkeypatch.setenv("FAKE_NEURON_STRICT", "0")  # the library does not notice either
    real = transformers_neuronx.LlamaForSampling.speculative_forward
    monkeypatch.setattr(
        transformers_neuronx.LlamaForSampling,
        "speculative_forward",
        lambda model, *arguments, **options: wrong(real, model, *arguments, **options),
    )
    assert_serves(load_chunks(tmp_path), caplog, warnings=1)
    fake.violations.clear()


def test_the_program_of_chunks_runs_at_the_start_also_where_the_longest_prompt_has_one_token_more(tmp_path, monkeypatch):
    calls, real = [], transformers_neuronx.LlamaForSampling.speculative_forward

    def record(model, ids, *rest, **options):
        calls.append(ids.shape)
        return real(model, ids, *rest, **options)

    monkeypatch.setattr(transformers_neuronx.LlamaForSampling, "speculative_forward", record)
    assert load_chunks(tmp_path, max_input_tokens=CHUNK + 1).prefill_chunk == CHUNK
    assert calls == [(1, CHUNK)]


def test_a_device_that_fails_in_a_chunk_at_the_start_ends_it_with_the_setting_to_change(tmp_path, monkeypatch):
    def fail(model, *arguments, **options):
        fake.runtime().die('nrt_execute status=1004 message="Execution error"')

    monkeypatch.setattr(transformers_neuronx.LlamaForSampling, "speculative_forward", fail)
    message = refusal(tmp_path, max_batch_size=4, prefill_chunk=CHUNK)
    assert message.startswith("the program of prompt chunks fails") and message.endswith("give --prefill-chunk 0")


# Compiled models


def test_a_folder_is_served_with_the_chunks_that_it_was_compiled_for(tmp_path):
    output = compiled(tmp_path, "--prefill-chunk", str(CHUNK), "--max-batch-size", "2")
    assert serve(output).prefill_chunk == CHUNK and not fake.compiles
    fake.restart()
    assert serve(output, prefill_chunk=CHUNK).prefill_chunk == CHUNK
    fake.restart()
    assert serve(output, prefill_chunk=0).prefill_chunk is None and not fake.compiles
    with pytest.raises(ConfigError, match=r"--prefill-chunk 8 \(PREFILL_CHUNK\) contradicts .* compiled for 4; leave it out"):
        serve(output, prefill_chunk=8)
    fake.restart()
    assert serve(output, max_input_tokens=CHUNK).prefill_chunk is None  # all prompts are that short


@pytest.mark.parametrize(("family", "model_class"), [("llama", "LlamaForSampling"), ("mistral", "MistralForSampling")])
def test_a_folder_of_an_older_version_is_served_as_before_and_not_compiled_again(tmp_path, monkeypatch, family, model_class):
    before = {"llama": neuron.LLAMA, "mistral": neuron.MISTRAL}
    monkeypatch.setattr(neuron, "FAMILIES", neuron.FAMILIES | before)
    output = compiled(tmp_path, "--prefill-chunk", "0", "--max-batch-size", "4", config=FAMILIES[family])
    monkeypatch.undo()
    manifest = json.loads((output / "config.json").read_text())
    assert manifest["neuron"].pop("model_class") == model_class
    del manifest["neuron"]["prefill_chunk"]
    (output / "config.json").write_text(json.dumps(manifest))
    batch = Batch(serve(output))
    assert batch.model.prefill_chunk is None and not fake.compiles
    batch.join(0, [5] * 10)
    batch.step()
    assert batch.leave(0) == alone([5] * 10, 12)
    with pytest.raises(ConfigError, match=r"--prefill-chunk 4 \(PREFILL_CHUNK\) contradicts .* compiled for 0"):
        serve(output, prefill_chunk=CHUNK)


def test_a_folder_that_was_compiled_for_another_class_is_refused(tmp_path):
    output = compiled(tmp_path)
    (output / "config.json").write_text((output / "config.json").read_text().replace("LlamaForSampling", "OtherForSampling"))
    with pytest.raises(ModelError, match="compiled for OtherForSampling, not LlamaForSampling; compile it again"):
        serve(output)


def test_another_number_of_tokens_is_another_set_of_programs_in_the_cache(tmp_path, caplog):
    caplog.set_level("INFO")
    load_chunks(tmp_path)
    fake.restart()
    load_chunks(tmp_path)
    assert not fake.compiles
    fake.restart()
    load_chunks(tmp_path, prefill_chunk=6)
    assert fake.compiles and "other values: prefill_chunk 6 instead of 4" in caplog.text
