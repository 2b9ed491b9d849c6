"""The fake of transformers-neuronx keeps the library's contract, and raises where the library is silently wrong.

The rules are numbered as in the list that they come from; the contract alone proves rules 1, 20 and 24.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

FAKE = str(Path(__file__).parents[1] / "fakes" / "neuron")
sys.path.insert(0, FAKE)
pytest.register_assert_rewrite("neuron_contract")

import transformers_neuronx as neuronx  # noqa: E402
from neuron_contract import *  # noqa: E402, F403
from neuron_contract import (  # noqa: E402
    LLAMA,
    MISTRAL,
    OPT,
    SLOTS,
    VOCABULARY,
    A,
    B,
    C,
    assert_same,
    call,
    decode,
    load,
    load_slots,
    on_device,
    prefill,
    sampling,
    text,
    write_checkpoint,
    zeros,
)
from transformers_neuronx import fake, models  # noqa: E402

sys.path.remove(FAKE)

SMALL = {"n_positions": [8], "context_length_estimate": [4]}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEOX = OPT | {"model_type": "gpt_neox"}
BLOOM = {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}


@pytest.fixture(scope="module", autouse=True)
def one_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("FAKE_NEURON_", "NEURON_"))]:
            patch.delenv(name)
        patch.setenv("FAKE_NEURON_STATE_DIR", str(tmp_path_factory.mktemp("machine")))
        yield
        fake.restart()


@pytest.fixture(autouse=True)
def no_violations():
    yield
    assert not fake.violations


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The folder of a machine of its own, on which this process has done nothing yet."""
    former, fake._runtime = fake._runtime, None
    monkeypatch.setenv("FAKE_NEURON_STATE_DIR", str(tmp_path / "machine"))
    fake.compiles.clear()
    yield fake.state_dir()
    fake.restart()
    fake._runtime = former


@pytest.fixture
def slots(folder, machine):
    """A model of four slots of its own."""
    return on_device(load_slots(folder))


@contextlib.contextmanager
def violation(message: str):
    with pytest.raises(fake.FakeNeuronViolation, match=message):
        yield
    assert re.search(message, fake.violations.pop())
    assert re.search(message, (fake.state_dir() / "violations.log").read_text().splitlines()[-1])


def process(code: str, **environment) -> subprocess.Popen:
    paths = os.pathsep.join([FAKE, str(Path(__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-c", "from neuron_contract import *\nfrom transformers_neuronx import fake\n" + code],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HOLD = "on_device(load(Path({folder!r})))\nprint('taken', flush=True)\ninput()"


# Construction


def test_rule_02_a_program_for_each_bucket_and_batch_size(folder):
    model = load(folder, n_positions=512, context_length_estimate=None, batch_size=[1, 4])
    assert (model.token_buckets, model.context_buckets) == ([128, 256, 512], [64, 128, 256])
    assert len(model._programs) == 12
    with pytest.raises(AssertionError):
        load(folder, n_positions=64, context_length_estimate=65)
    with pytest.raises(ValueError):
        load(folder, context_unroll=3)


@pytest.mark.parametrize("cls", [neuronx.LlamaForSampling, neuronx.MistralForSampling])
def test_rule_04_a_misspelt_argument_is_a_violation(tmp_path, cls):
    with violation("context_lenght_estimate"):
        load(write_checkpoint(tmp_path, MISTRAL), cls, context_lenght_estimate=64)


def other_family(folder: Path, config: dict) -> Path:
    write_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [OPT, BLOOM, GPT2], ids=lambda config: config["model_type"])
def test_rule_05_other_families_have_no_slots(tmp_path, machine, config):
    options = {"n_positions": 32, "context_length_estimate": [16]}
    folder = other_family(tmp_path / "it", config)
    model = load_slots(folder, cls=neuronx.NeuronAutoModelForCausalLM, **options)
    with pytest.raises(AssertionError):
        model.to_neuron()
    model = on_device(load(folder, neuronx.NeuronAutoModelForCausalLM, **options))
    logits = call(model, torch.tensor([A]), None, zeros(1))[0]
    assert_same(logits, fake.expected_logits(A, VOCABULARY))
    logits = call(model, torch.tensor([[5]]), torch.tensor([len(A)]), zeros(1))[0]
    assert_same(logits, fake.expected_logits([*A, 5], VOCABULARY))


def test_rule_05_neox_is_neither_saved_nor_loaded(tmp_path, machine):
    folder = other_family(tmp_path / "it", NEOX)
    model = neuronx.GPTNeoXForSampling.from_pretrained(str(folder), tp_degree=1, n_positions=32)
    model.to_neuron()
    assert not hasattr(model, "save") and not hasattr(model, "load")
    assert_same(call(model, torch.tensor([A]), None, zeros(1))[0], fake.expected_logits(A, VOCABULARY))


def test_rule_05_mistral_and_mixtral_have_slots(tmp_path, machine):
    for model_type in ("mistral", "mixtral"):
        folder = other_family(tmp_path / model_type, LLAMA | {"model_type": model_type})
        model = on_device(load_slots(folder, cls=neuronx.NeuronAutoModelForCausalLM))
        assert_same(prefill(model, A, 1)[0], fake.expected_logits(A, VOCABULARY))


def test_rule_05_a_window_is_said_to_be_one_too_long_for_prompts(tmp_path, machine):
    folder = other_family(tmp_path / "it", MISTRAL | {"sliding_window": 4})
    model = on_device(load(folder, neuronx.MistralForSampling))
    with violation("longer than the window"):
        call(model, torch.tensor([A]), None, zeros(1))


SILENT = {
    "rope_parameters": {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "stretched rope_parameters": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0}},
    "head_dim": {"head_dim": 16},
    "attention_bias": {"attention_bias": True},
}


@pytest.mark.parametrize("name", SILENT)
def test_rule_06_what_the_library_would_not_read_of_a_config(tmp_path, name):
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | SILENT[name]
    with violation(name.split()[-1]):
        load(write_checkpoint(tmp_path, config))


def test_rule_06_transformers_5(folder, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_TRANSFORMERS", "5.0.0")
    with violation("rope_theta"):
        load(folder)


# The device


def test_rule_07_nothing_is_taken_before_to_neuron(folder, machine):
    model = load_slots(folder)
    assert fake._runtime is None
    assert not list(machine.glob("*.lock"))
    with pytest.raises(ValueError):
        prefill(model, A, 0)


@pytest.mark.processes
def test_rule_08_cores_belong_to_one_process_until_it_ends(folder, machine, capfd):
    holder = process(HOLD.format(folder=str(folder)), FAKE_NEURON_CORES="4")
    try:
        assert holder.stdout.readline() == "taken\n", holder.stderr.read()
        with pytest.raises(RuntimeError, match="could not be initialized"):
            on_device(load(folder))
        assert "NeuronCore(s) not available - Requested:nc0-nc1 Available:0" in capfd.readouterr().err
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    on_device(load(folder))


def test_rule_08_a_process_takes_all_cores_or_those_that_it_asks_for(folder, machine, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_CORES", "8")
    cases = {
        ("NUM", "2"): [0, 1],
        ("VISIBLE", "3"): [3],
        ("VISIBLE", "2-5"): [2, 3, 4, 5],
        ("VISIBLE", "1,2,3-4"): [1, 2, 3, 4],
        ("NUM", "0"): [*range(8)],
    }
    for (name, value), cores in cases.items():
        monkeypatch.setenv(f"NEURON_RT_{name}_CORES", value)
        assert fake.runtime().cores == cores
        monkeypatch.delenv(f"NEURON_RT_{name}_CORES")
        assert fake.runtime().cores == cores  # read once
        fake.restart()
    for name, value in (("NUM", "9"), ("VISIBLE", "7-8"), ("VISIBLE", "1,3"), ("VISIBLE", "x"), ("NUM", "many")):
        monkeypatch.setenv(f"NEURON_RT_{name}_CORES", value)
        with pytest.raises(RuntimeError, match="could not be initialized"):
            fake.runtime()
        monkeypatch.delenv(f"NEURON_RT_{name}_CORES")
    assert fake.runtime().cores == [*range(8)]  # what failed holds nothing


@pytest.mark.parametrize("cores, tp_degree", [(2, 4), (8, 3), (8, 6)])
def test_rule_09_a_degree_that_the_cores_do_not_have(folder, machine, monkeypatch, cores, tp_degree):
    monkeypatch.setenv("FAKE_NEURON_CORES", str(cores))
    with pytest.raises(RuntimeError, match="nrt_load_collectives status=2"):
        on_device(load_slots(folder, tp_degree=tp_degree))


LLAMA_3_8B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_rule_10_memory_is_counted(tmp_path, machine, monkeypatch):
    folder = other_family(tmp_path / "it", LLAMA_3_8B)
    eight_billion = {"amp": "bf16", "tp_degree": 2, "n_positions": [4096], "context_length_estimate": [2048]}
    model = load_slots(folder, **eight_billion)
    assert 8.5e9 < model._bytes_per_core() < 8.7e9  # 7.5 of weights and 1.07 of cache
    model.to_neuron()
    with pytest.raises(RuntimeError, match="nrt_tensor_allocate status=4"):
        load_slots(folder, slots=8, **eight_billion).to_neuron()  # next to the first
    fake.restart()
    load_slots(folder, slots=32, **eight_billion).to_neuron()
    fake.restart()
    with pytest.raises(RuntimeError, match="nrt_tensor_allocate status=4"):
        load_slots(folder, slots=40, **eight_billion).to_neuron()


def test_rule_11_no_device(folder, machine, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_NEURON_CORES", "0")
    with pytest.raises(RuntimeError, match="could not be initialized"):
        on_device(load(folder))
    assert "aws-neuronx-dkms" in capfd.readouterr().err


# Compiled programs


def test_rule_12_names_follow_from_all_that_is_compiled(folder, tmp_path, monkeypatch):
    def names(**options):
        return set(load_slots(folder, **options)._programs)

    first = names()
    assert names() == first
    assert len(first) == 6
    neuron = {"fuse_qkv": True}
    for changed in ({"slots": 2}, {"tp_degree": 2}, {"amp": "bf16"}, {"n_positions": [8, 64]}, {"neuron": neuron}):
        assert not names(**changed) & first
    assert names(neuron={"compilation_worker_count": 1}) == first
    assert names(neuron=sampling(top_k=1)) == names(neuron=sampling(top_k=2))
    monkeypatch.setenv("FAKE_NEURON_SDK", "2.24.0")
    assert not names() & first


def test_rule_13_load_looks_at_nothing_until_to_neuron(folder, slots, tmp_path):
    slots.save(tmp_path)
    other = load_slots(folder)
    other.load(tmp_path / "missing")
    other.load(tmp_path)
    next(tmp_path.glob("*.neff")).unlink()
    with pytest.raises(FileNotFoundError):
        other.to_neuron()
    with violation("load"):
        slots.load(tmp_path)


def test_rule_13_a_file_that_was_cut_short(folder, slots, tmp_path):
    slots.save(tmp_path)
    next(tmp_path.glob("*.neff")).write_text("")
    other = load_slots(folder)
    other.load(tmp_path)
    with pytest.raises(RuntimeError, match="nrt_load_collectives"):
        other.to_neuron()


def test_rule_15_compiling_is_counted_and_takes_time(folder, machine, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_COMPILE_S", "0.05")
    before = time.monotonic()
    model = on_device(load_slots(folder, neuron={"compilation_worker_count": 2}))
    assert time.monotonic() - before >= 0.15
    assert len(fake.compiles) == len((machine / "compiles.log").read_text().splitlines()) == 6
    model.save(tmp_path)
    loaded = load_slots(folder)
    loaded.load(tmp_path)
    loaded.to_neuron()
    assert len(fake.compiles) == 6
    assert loaded.is_compiled()


def test_rule_15_compiling_needs_no_device(folder, machine, tmp_path):
    model = load_slots(folder)
    model.cpu_compile()
    model.save(tmp_path)
    assert fake._runtime is None
    assert len(list(tmp_path.glob("*.neff"))) == 6


# Continuous batching: prefill


def test_rule_16_what_a_prompt_must_look_like(slots):
    with pytest.raises(AttributeError):
        call(slots, torch.tensor([A]), None, torch.tensor([0]))
    with violation("start_ids=None"):
        call(slots, torch.tensor([A]), torch.arange(len(A))[None], None)
    with violation("3 slots for 2 prompts"):
        call(slots, torch.tensor([A, A]), torch.arange(len(A)).expand(2, -1), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("places", [[0, 1, 2, 4, 0], [0, 1, 1, 2, 3], [0, 2, 1, 0, 0], [0, 1, 0, 1, 2]])
def test_rule_17_positions_of_a_prompt(slots, places):
    with violation("cache_ids of a prompt"):
        call(slots, torch.tensor([A]), torch.tensor([places]), torch.tensor([0]))


def test_rule_17_slots_of_a_prompt(slots):
    two = torch.tensor([A, A]), torch.arange(len(A)).expand(2, -1)
    with violation("named twice"):
        call(slots, *two, torch.tensor([1, 1]))
    for outside in (-1, SLOTS):
        with violation("not all below 4"):
            prefill(slots, A, outside)


def test_rule_18_a_prompt_of_one_token_damages_the_others(slots):
    prefill(slots, A, 2)
    logits = prefill(slots, [7], 0)
    assert_same(logits[0], fake.expected_logits([7], VOCABULARY))
    with violation("slot 2 is used again"):
        decode(slots, [5, 5], [1, len(A)], [0, 2])


def test_rule_18_a_prompt_of_one_token_next_to_a_live_slot(slots):
    prefill(slots, A, 2)
    slots.fake_live = {2}
    with violation("slot 2 is live"):
        prefill(slots, [7], 0)


def test_rule_19_the_rest_of_the_bucket_is_garbage(slots):
    prefill(slots, A, 1)
    row = slots._row(1)
    assert row.tokens[:8] == [*A, 0, 0, 0]
    assert row.length == len(A)
    prefill(slots, C, 1)
    prefill(slots, B, 1)
    assert row.tokens[:9] == [*B, 0, *C[4:]]
    prefill(slots, text(8, 1), 1)
    assert row.tokens[:9] == [*text(8, 1), C[8]]  # a prompt as long as a bucket runs in that one
    prefill(slots, B, 1)
    assert_same(decode(slots, [5], [len(B)], [1])[0], fake.expected_logits([*B, 5], VOCABULARY))


# Continuous batching: decode


def test_rule_21_what_a_step_must_look_like(slots):
    for slot in range(SLOTS):
        prefill(slots, A, slot)
    with violation("named twice"):
        decode(slots, [5, 5], [len(A)] * 2, [1, 1])
    with violation("without a row"):
        call(slots, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64), zeros(0))
    with violation("2 tokens, 2 positions and 1 slots"):
        decode(slots, [5, 5], [len(A)] * 2, [1])
    with pytest.raises(RuntimeError):
        decode(slots, [5], [len(A)], [SLOTS])
    assert decode(slots, [5] * SLOTS, [len(A)] * SLOTS, [3, 2, 1, 0]).shape == (SLOTS, VOCABULARY)


@pytest.mark.parametrize("ahead", [1, 2, -2, -3])
def test_rule_22_a_token_goes_right_behind_the_last_one(slots, ahead):
    prefill(slots, A, 1)
    with violation(f"slot 1 holds 5 tokens, so its next one is not at position {5 + ahead}"):
        decode(slots, [A[ahead % len(A)]], [len(A) + ahead], [1])


def test_rule_22_another_token_cannot_replace_the_last_one(slots):
    prefill(slots, A, 1)
    decode(slots, [A[-1]], [len(A) - 1], [1])
    with violation("would replace it"):
        decode(slots, [A[-1] ^ 1], [len(A) - 1], [1])


def test_rule_22_a_slot_that_holds_nothing(slots):
    with violation("slot 1 holds 0 tokens"):
        decode(slots, [5], [3], [1])


def test_rule_23_a_slot_that_is_left_out_is_damaged(slots):
    prefill(slots, A, 0)
    prefill(slots, B, 1)
    decode(slots, [5], [len(A)], [0])
    with violation(r"slot 1 is used again, but a decode call of \[0\] left it out"):
        decode(slots, [6, 6], [len(A) + 1, len(B)], [0, 1])
    prefill(slots, B, 1)
    decode(slots, [6, 6], [len(A) + 1, len(B)], [0, 1])


def test_rule_23_a_slot_that_is_said_to_be_live_cannot_be_left_out(slots):
    prefill(slots, A, 0)
    prefill(slots, B, 1)
    slots.fake_live = {0, 1}
    with violation("slot 1 is live"):
        decode(slots, [5], [len(A)], [0])
    slots.fake_live = {0}
    decode(slots, [5], [len(A)], [0])


def test_rule_23_damage_shows_in_the_logits(slots, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_STRICT", "0")
    prefill(slots, A, 0)
    prefill(slots, B, 1)
    decode(slots, [5], [len(A)], [0])
    logits = decode(slots, [6, 6], [len(A) + 1, len(B)], [0, 1])
    assert_same(logits[0], fake.expected_logits([*A, 5, 6], VOCABULARY))
    assert_same(logits[1], fake.expected_logits([0, *B[1:], 6], VOCABULARY))
    assert len(fake.violations) == 1
    fake.violations.clear()


# Static batches


def test_rule_25_without_slots_all_rows_share_a_position(folder, machine):
    model = on_device(load(folder))
    assert_same(call(model, torch.tensor([A]), None, zeros(1))[0], fake.expected_logits(A, VOCABULARY))
    with violation("cache_ids=None"):
        call(model, torch.tensor([[5]]), None, zeros(1))
    with violation("row 0 holds 5 tokens"):
        call(model, torch.tensor([[5]]), torch.tensor([7]), zeros(1))
    with violation("cache_ids of a prompt"):
        call(model, torch.tensor([A]), torch.tensor([0, 1, 1, 2, 3]), zeros(1))
    logits = call(model, torch.tensor([[5]]), torch.tensor([5]), zeros(1))
    assert_same(logits[0], fake.expected_logits([*A, 5], VOCABULARY))
    assert model.fake_slow_tokens == 0
    call(model, torch.tensor([text(20, 1)]), None, zeros(1))
    assert model.fake_slow_tokens == 4  # what exceeds the largest bucket runs token by token


# What comes back


def test_rule_26_logits_and_tokens(slots, folder):
    logits = prefill(slots, A, 0)
    assert (logits.dtype, logits.shape, logits.requires_grad) == (torch.float32, (1, VOCABULARY), False)
    with torch.inference_mode():
        logits.zero_()
    assert_same(prefill(slots, A, 0)[0], fake.expected_logits(A, VOCABULARY))
    tokens = prefill(on_device(load_slots(folder, neuron=sampling(top_k=1))), A, 0)
    assert (tokens.dtype, tokens.shape) == (torch.int32, (1, 1))


def test_rule_26_the_device_keeps_to_top_k_and_top_p():
    logits, generator = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])), torch.Generator().manual_seed(0)

    def drawn(top_k=4, top_p=1.0, temperature=1.0, global_top_k=None, at_least=1):
        return {fake_draw(top_k, top_p, temperature, global_top_k, at_least) for _ in range(200)}

    def fake_draw(top_k, top_p, temperature, global_top_k, at_least):
        return models.draw(logits, generator, global_top_k, top_k, top_p, temperature, at_least)

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=1) == {0}
    assert drawn(top_k=2) == drawn(global_top_k=2) == {0, 1}
    assert drawn(top_p=0.5) == {0}
    assert drawn(top_p=0.6) == drawn(top_p=0.1, at_least=2) == {0, 1}
    assert drawn(temperature=0.01) == {0}


def test_rule_26_the_device_makes_token_0_of_what_is_no_number(folder, machine, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "nan:1")
    model = on_device(load_slots(folder, neuron=sampling(top_k=5)))
    first = int(prefill(model, A, 0))
    assert int(decode(model, [first], [len(A)], [0])) == 0


def test_rule_27_the_settings_of_the_constructor_are_used_up(folder, machine):
    neuron = sampling(top_k=1)
    given = neuron["on_device_generation"]
    model = on_device(load_slots(folder, neuron=neuron))
    assert given.vocab_size == VOCABULARY
    with pytest.raises((TypeError, RuntimeError)):
        model.update_generation_config(given)
    model.update_generation_config(neuronx.GenerationConfig(do_sample=True, dynamic=True, top_k=5))


def test_rule_27_parameters_that_cannot_be_drawn_with(folder, machine):
    model = on_device(load_slots(folder, neuron=sampling(top_k=5, temperature=0.0)))
    with violation("cannot draw"):
        prefill(model, A, 0)


# Threads, processes, failures


def elsewhere(function) -> BaseException | None:
    """What `function` raises in a thread of its own."""
    raised = []

    def run():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_rule_28_one_call_at_a_time_from_one_thread(slots):
    prefill(slots, A, 0)
    assert isinstance(elsewhere(lambda: prefill(slots, A, 0)), fake.FakeNeuronViolation)
    assert "another thread" in fake.violations.pop()
    with fake.runtime():
        assert isinstance(elsewhere(lambda: prefill(slots, A, 0)), fake.FakeNeuronViolation)
    assert "second forward()" in fake.violations.pop()
    prefill(slots, A, 0)


def test_rule_30_nothing_works_after_an_error_of_the_device(slots, folder, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "step:3")
    prefill(slots, A, 0)
    decode(slots, [5], [len(A)], [0])
    decode(slots, [5], [len(A) + 1], [0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="status=1004"):
            decode(slots, [5], [len(A) + 2], [0])
    with pytest.raises(RuntimeError):
        prefill(slots, A, 1)
    with pytest.raises(RuntimeError):
        on_device(load_slots(folder))


# Failures on purpose


def test_a_file_makes_a_running_process_fail_once(slots, machine):
    prefill(slots, A, 0)
    (machine / "fail").write_text("nan\n")
    assert decode(slots, [5], [len(A)], [0]).isnan().all()
    assert not (machine / "fail").exists()
    assert_same(decode(slots, [6], [len(A) + 1], [0])[0], fake.expected_logits([*A, 5, 6], VOCABULARY))
    (machine / "fail").write_text("prefill")
    with pytest.raises(RuntimeError, match="status=1004"):
        prefill(slots, A, 1)
