"""NeuronModel on a fake of transformers-neuronx that raises wherever the library would silently go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import Server, events
from served import wait_until

import config as configuration
from config import DEVICE_TOP_K, Config, ConfigError, Manifest
from model import DeviceLost, ModelError
from rehearsal import Offstage, Rehearsal
from worker import Worker

FAKE = str(Path(__file__).parent / "fakes" / "neuron")
sys.path.insert(0, FAKE)
import neuronxcc  # noqa: E402
import transformers_neuronx  # noqa: E402
from transformers_neuronx import fake  # noqa: E402

import export  # noqa: E402
import neuron_model  # noqa: E402
import plan  # noqa: E402
from neuron_model import Build, NeuronModel, buckets, explain, legacy_config  # noqa: E402

sys.path.remove(FAKE)

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
WINDOW = 24
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": LLAMA | {"model_type": "opt", "ffn_dim": 64},
    "bloom": {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": LLAMA | {"model_type": "gpt_neox"},
}
BATCHING = ["llama", "mistral", "mixtral"]


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with two cores, of which nothing is left over."""
    for name in [name for name in os.environ if name.startswith(("FAKE_NEURON_", "NEURON_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE_NEURON_STATE_DIR", str(tmp_path / "machine"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "")  # so that what the model sets is undone
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    monkeypatch.setattr(neuron_model, "CORES_WAIT_S", -1.0)
    monkeypatch.setattr(configuration, "set_up_logging", lambda json_output: None)  # the logs of this process are pytest's
    fake.restart()
    yield
    fake.restart()
    os.environ.pop("NEURON_RT_NUM_CORES", None)
    assert not fake.violations


def checkpoint(folder, config=LLAMA):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def load(tmp_path, config=LLAMA, **settings):
    settings = {"max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1} | settings
    folder = checkpoint(tmp_path / "model", config)
    return serve(folder, **settings)


def serve(folder, announce=lambda phase: None, **settings):
    build = Build.decide(Config(model_id=str(folder), device="neuron", **settings), folder, Manifest.read(folder))
    return NeuronModel(build, Path(tempfile.mkdtemp(dir=folder.parent)), announce)


def refusal(tmp_path, config=LLAMA, **settings):
    with pytest.raises((ModelError, ConfigError)) as refused:
        load(tmp_path, config, **settings)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


GREEDY = (1, 1.0, 1.0)


class Batch:
    """Requests on slots, each continued with the likeliest token, or with what the device chose, as the worker does it."""

    def __init__(self, model):
        self.model = model
        self.texts = {}  # slot → all tokens so far

    def join(self, slot, prompt, sampling=GREEDY):
        if self.model.sampling == "device":
            self.model.set_sampling(slot, *sampling)
        self.texts[slot] = [*prompt, *self._chosen(self.model.prefill(slot, prompt))]

    def _chosen(self, output):
        if self.model.sampling == "device":
            assert output.ndim == 1 and output.dtype == torch.int64
            return output.tolist()
        assert output.shape[1:] == (VOCABULARY,)
        assert output.dtype == (torch.bfloat16 if self.model.dtype == "bfloat16" else torch.float32)
        return output.argmax(-1).tolist()

    def step(self):
        slots = sorted(self.texts)
        tokens = torch.tensor([self.texts[slot][-1] for slot in slots])
        positions = torch.tensor([len(self.texts[slot]) - 1 for slot in slots])
        chosen = self._chosen(self.model.decode(tokens, positions, torch.tensor(slots)))
        assert len(chosen) == len(slots)
        for slot, token in zip(slots, chosen):
            self.texts[slot].append(token)

    def leave(self, slot):
        return self.texts.pop(slot)


def alone(prompt, length):
    """What a prompt must become when nobody else is there."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(fake.expected_logits(tokens, VOCABULARY).argmax()))
    return tokens


@pytest.mark.parametrize(
    ("family", "sampling"), [*((family, "host") for family in BATCHING), ("llama", "device"), ("mistral", "device")]
)
def test_requests_that_come_and_go_get_the_text_that_they_get_alone(tmp_path, family, sampling):
    batch = Batch(load(tmp_path, FAMILIES[family], max_batch_size=4, sampling=sampling))
    batch.join(0, [5, 6, 7])
    batch.step()
    batch.join(2, [8])  # a prompt of one token
    batch.step()
    batch.join(1, [9, 10])
    batch.step()
    assert batch.leave(0) == alone([5, 6, 7], 7)
    batch.step()
    batch.join(0, [11] * (WINDOW - 1))  # the slot again, with the longest prompt
    assert batch.leave(0) == alone([11] * (WINDOW - 1), WINDOW)
    while len(batch.texts[2]) < WINDOW:
        batch.step()
    assert batch.leave(2) == alone([8], WINDOW)
    text = batch.leave(1)
    assert text == alone([9, 10], len(text))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=25))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schedule_over_eight_slots_gives_everyone_the_text_of_his_own(tmp_path, schedule):
    fake.restart()
    batch = Batch(load(tmp_path, max_batch_size=8))
    prompts = {}
    for n, (slot, length, steps) in enumerate(schedule):
        if slot in batch.texts:
            text = batch.leave(slot)
            assert text == alone(prompts[slot], len(text))
        prompts[slot] = [n % VOCABULARY] * length
        batch.join(slot, prompts[slot])
        for _ in range(steps):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                assert batch.leave(full) == alone(prompts[full], WINDOW)
            if batch.texts:
                batch.step()
    for slot, text in batch.texts.items():
        assert text == alone(prompts[slot], len(text))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 22, 23])
def test_borders_of_prompt_and_position_buckets_are_no_borders_of_the_text(tmp_path, length):
    model = load(tmp_path, max_batch_size=2, prefill_buckets=(8, 16), position_buckets=(8, 16))
    batch = Batch(model)
    batch.join(0, [3, 4])
    batch.join(1, list(range(1, length + 1)))
    while len(batch.texts[1]) < WINDOW:
        batch.step()
    assert batch.leave(1) == alone(range(1, length + 1), WINDOW)
    text = batch.leave(0)
    assert text == alone([3, 4], len(text))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(BATCHING)))
def test_families_that_cannot_batch_run_one_request_at_a_time(tmp_path, family):
    model = load(tmp_path, FAMILIES[family])
    assert model.batch_size == 1
    for prompt in ([5, 6, 7], [8]):
        batch = Batch(model)
        batch.join(0, prompt)
        for _ in range(5):
            batch.step()
        assert batch.leave(0) == alone(prompt, len(prompt) + 6)
    assert f"{family} models run one request at a time on Neuron; give 1" in refusal(
        tmp_path, FAMILIES[family], max_batch_size=2
    )


def test_a_slot_that_a_step_did_not_name_is_not_taken_up_again(tmp_path):
    model = load(tmp_path, max_batch_size=2)
    batch = Batch(model)
    batch.join(0, [5, 6])
    batch.join(1, [7, 8])
    forgotten = batch.leave(1)
    batch.step()
    batch.texts[1] = forgotten
    with pytest.raises(AssertionError, match=r"slots \[0, 1\] hold \[\d, None\] positions"):
        batch.step()


def test_a_position_that_is_not_the_next_one_is_not_run(tmp_path):
    model = load(tmp_path, max_batch_size=2)
    model.prefill(0, [5, 6])
    for position in (1, 3):
        with pytest.raises(AssertionError):
            model.decode(torch.tensor([1]), torch.tensor([position]), torch.tensor([0]))


def test_a_slot_that_has_another_prompt_does_not_go_on_where_the_one_before_was(tmp_path):
    model = load(tmp_path, max_batch_size=2)
    model.prefill(0, [5, 6])
    model.decode(torch.tensor([1]), torch.tensor([2]), torch.tensor([0]))
    model.prefill(0, [7])
    with pytest.raises(AssertionError, match=r"slots \[0\] hold \[1\] positions, not \[3\]"):
        model.decode(torch.tensor([1]), torch.tensor([3]), torch.tensor([0]))
    model.decode(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]))


@pytest.mark.parametrize(("family", "slots"), [("llama", 3), ("llama", 1), ("opt", 1)])
def test_an_understudy_runs_without_the_device_and_beyond_the_last_position(tmp_path, family, slots):
    model = load(tmp_path, FAMILIES[family], max_batch_size=slots)
    batch = Batch(model)
    batch.join(0, [5, 6])
    understudy = Worker(model.understudy(), Offstage(), frozenset(), slots)
    rehearsal = Rehearsal(understudy)
    wait_until(lambda: rehearsal.turns)
    rehearsal.end()
    for _ in range(2 * WINDOW):
        understudy.turn()
        understudy.end.drop()
    assert understudy.slots.busy == min(2, slots)
    for _ in range(5):
        batch.step()
    assert batch.leave(0) == alone([5, 6], 8)


# Sampling on the device


@pytest.fixture
def updates(monkeypatch):
    """What the device was told since it has the model: one entry a time, top_k, top_p and temperature of each slot."""
    told = []
    update = transformers_neuronx.LlamaForSampling.update_generation_config

    def listen(model, new):
        told.append(list(zip(new.top_k, new.top_p, new.temperature)))
        update(model, new)

    monkeypatch.setattr(transformers_neuronx.LlamaForSampling, "update_generation_config", listen)
    return told


JOINS = st.tuples(
    st.integers(0, 3), st.integers(1, 20), st.integers(0, 4), st.sampled_from([GREEDY, (0, 1.0, 5.0), (9, 0.7, 2.0)])
)


@given(st.lists(JOINS, min_size=1, max_size=20))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_greedy_requests_on_the_device_get_their_own_text_whatever_is_sampled_beside_them(tmp_path, updates, schedule):
    fake.restart()
    updates.clear()
    batch, lines, changes = Batch(load(tmp_path, max_batch_size=4, sampling="device")), [GREEDY] * 4, 0
    prompts = {}

    def leave(slot):
        text = batch.leave(slot)
        assert text[: len(prompts[slot])] == prompts[slot]
        assert lines[slot] != GREEDY or text == alone(prompts[slot], len(text))

    for n, (slot, length, steps, sampling) in enumerate(schedule):
        if slot in batch.texts:
            leave(slot)
        prompts[slot] = [n % VOCABULARY] * length
        changes += lines[slot] != sampling
        lines[slot] = sampling
        batch.join(slot, prompts[slot], sampling)
        for _ in range(steps):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                leave(full)
            if batch.texts:
                batch.step()
    for slot in list(batch.texts):
        leave(slot)
    assert len(updates) == changes
    everything = [(top_k or min(VOCABULARY, DEVICE_TOP_K), top_p, temperature) for top_k, top_p, temperature in lines]
    assert not updates or updates[-1] == everything


def test_the_device_is_told_only_what_is_new(tmp_path, updates):
    batch = Batch(load(tmp_path, max_batch_size=2, sampling="device"))
    batch.join(1, [5, 6])
    batch.step()
    assert updates == []
    batch.join(0, [7], (3, 0.5, 2.0))
    assert updates == [[(3, 0.5, 2.0), GREEDY]]
    batch.leave(0)
    batch.join(0, [8], (3, 0.5, 2.0))
    batch.step()
    assert len(updates) == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((1, 0.5, 9.0), GREEDY),  # there is but one to draw from
        ((0, 0.5, 0.009), GREEDY),
        ((5, 0.5, 1e-300), GREEDY),
        ((5, 0.5, 0.01), (5, 0.5, 0.01)),
        ((0, 1.0, 1.0), (256, 1.0, 1.0)),
        ((256, 1.0, 1.0), (256, 1.0, 1.0)),
        ((5, 1e-30, 1e300), (5, 1e-30, 10000.0)),
    ],
)
def test_what_the_device_cannot_compute_with_is_brought_within_its_bounds(tmp_path, updates, asked, told):
    model = load(tmp_path, LLAMA | {"vocab_size": 300}, max_batch_size=2, sampling="device")
    model.set_sampling(0, 7, 1.0, 7.0)
    model.set_sampling(0, *asked)
    assert updates[1] == [told, GREEDY]
    assert 0 <= int(model.prefill(0, [5, 6])) < 300


def test_of_a_small_vocabulary_the_device_draws_from_all(tmp_path, updates):
    model = load(tmp_path, LLAMA | {"vocab_size": 100}, sampling="device")
    assert model._model.neuron_config.on_device_generation.global_top_k == 100
    model.set_sampling(0, 256, 1.0, 1.0)
    assert updates[0][0] == (100, 1.0, 1.0)


def test_a_sampled_slot_draws_by_chance_from_its_first_token_on(tmp_path):
    model = load(tmp_path, max_batch_size=2, sampling="device")
    likeliest = alone([5, 6], 3)[-1]
    model.set_sampling(1, 0, 1.0, 50.0)
    assert len({int(model.prefill(1, [5, 6])) for _ in range(20)}) > 5
    model.set_sampling(0, *GREEDY)
    assert {int(model.prefill(0, [5, 6])) for _ in range(20)} == {likeliest}


def test_ids_beyond_the_vocabulary_are_handed_on_as_they_are(tmp_path, monkeypatch):
    """The worker ends the request of such a row, and that alone."""
    model = load(tmp_path, max_batch_size=2, sampling="device")
    forward = type(model._model).forward
    monkeypatch.setattr(type(model._model), "forward", lambda *call: torch.full_like(forward(*call), VOCABULARY + 7))
    assert int(model.prefill(0, [5, 6])) == VOCABULARY + 7


def test_a_device_that_fails_while_it_is_told_is_lost(tmp_path, monkeypatch):
    model = load(tmp_path, max_batch_size=2, sampling="device")
    monkeypatch.setattr(model._model, "update_generation_config", lambda new: torch.tensor([], dtype=torch.int64)[0])
    with pytest.raises(DeviceLost):
        model.set_sampling(0, 5, 1.0, 1.0)


def test_on_the_host_is_what_is_not_asked_otherwise(tmp_path):
    model = load(tmp_path)
    assert model.sampling == "host"
    assert model._model.neuron_config.on_device_generation is None


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "mistral"}))
def test_families_that_the_device_cannot_sample_are_refused(tmp_path, family):
    told = refusal(tmp_path, FAMILIES[family], sampling="device")
    assert told == (
        f"--sampling device (SAMPLING): transformers-neuronx cannot do that for {family} models; give SAMPLING=host"
    )
    assert load(tmp_path, FAMILIES[family], sampling="host").sampling == "host"


# What is compiled


@pytest.mark.parametrize(
    ("given", "limit", "made"),
    [
        (None, 100, [100]),
        (None, 128, [128]),
        (None, 129, [128, 129]),
        (None, 2048, [128, 256, 512, 1024, 2048]),
        (None, 2047, [128, 256, 512, 1024, 2047]),
        ((64, 512), 2048, [64, 512, 2048]),
        ((2048,), 2048, [2048]),
    ],
)
def test_buckets_reach_up_to_the_limit(given, limit, made):
    assert buckets(given, limit, "--prefill-buckets") == made


def test_buckets_beyond_the_limit_are_refused(tmp_path):
    assert "--prefill-buckets 64: more than the 23 tokens" in refusal(tmp_path, prefill_buckets=(64,))
    assert "--position-buckets 64: more than the 24 tokens" in refusal(tmp_path, position_buckets=(64,))


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_rotary_base_reaches_the_library_in_whichever_form_it_was_saved(tmp_path, version, theta):
    """With transformers 5's form it would go on with 10000, and without a word."""
    config = LLAMA | {"rope_theta": theta}
    if version == 5:
        del config["rope_theta"], config["torch_dtype"]
        config |= {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "dtype": "bfloat16"}
    model = load(tmp_path, config)
    assert model._model.config.rope_theta == theta
    assert model.dtype == "bfloat16"


def test_a_scaled_rotary_base_keeps_its_scaling():
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    legacy = legacy_config({"model_type": "llama", "rope_parameters": rope})
    assert legacy["rope_theta"] == 5e5
    scaling = {"rope_type": "llama3", "type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert legacy["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("config", "settings", "told"),
    [
        ({"model_type": "gptj"}, {}, "gptj is not served on Neuron: its answers are wrong after the first token"),
        ({"model_type": "qwen2"}, {}, "model_type 'qwen2' is not served on Neuron; these are: llama, mistral"),
        ({"head_dim": 16}, {}, "head_dim 16 is not served on Neuron"),
        ({"attention_bias": True}, {}, "has biases in its attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, {}, "stretches its positions (yarn)"),
        ({"model_type": "mistral", "sliding_window": 20}, {}, "slides its attention over 20 positions"),
        ({}, {"tp_degree": 4}, "the cores are held by another process"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path, config, settings, told):
    assert told in refusal(tmp_path, LLAMA | config, **settings)


# Cores and the device


def test_the_runtime_takes_no_more_cores_than_the_model_needs(tmp_path, monkeypatch):
    load(tmp_path, tp_degree=1)
    assert os.environ["NEURON_RT_NUM_CORES"] == "1"


@pytest.mark.parametrize(("visible", "cores"), [("0", 1), ("1", 1), ("0-1", 2), ("0,1", 2)])
def test_the_visible_cores_are_counted_and_left_as_they_are(tmp_path, monkeypatch, visible, cores):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    load(tmp_path)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == visible
    assert "NEURON_RT_NUM_CORES" not in os.environ
    if cores == 1:
        assert "needs more cores than the 1 that there are (NEURON_RT_VISIBLE_CORES=" in refusal(tmp_path, tp_degree=2)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("init", "no Neuron device can be used here"), ("oom", "the device has too little memory"), ("compile", "compiler")],
)
def test_what_fails_while_it_loads_is_one_line_that_a_person_understands(tmp_path, monkeypatch, fault, told):
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    assert told in refusal(tmp_path)


@pytest.mark.parametrize("fault", ["prefill:2", "step:2"])
def test_an_error_of_the_device_means_that_it_is_lost(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    batch = Batch(load(tmp_path, max_batch_size=2))
    batch.join(0, [5, 6])
    with pytest.raises(DeviceLost):
        for n in range(3):
            batch.step()
            batch.join(1, [7, n])


def test_what_the_runtime_says_is_explained_where_it_is_known():
    told = explain(RuntimeError('nrt_tensor_allocate status=4 message="Allocation Failure"'))
    assert told.startswith("the device has too little memory for this model")
    assert explain(ValueError("something new\nand more")) == "ValueError: something new"
    assert explain(StopIteration()) == "StopIteration"


@pytest.fixture
def holder(tmp_path):
    """Another process that holds all cores of the machine."""
    script = """if True:
        import fcntl, os, sys
        locks = [open(os.path.join(sys.argv[1], f"core-{core}.lock"), "w") for core in range(2)]
        for lock in locks:
            fcntl.lockf(lock, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
    """
    (tmp_path / "machine").mkdir(exist_ok=True)
    command = [sys.executable, "-c", script, str(tmp_path / "machine")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_cores_that_another_process_holds_are_waited_for(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(neuron_model, "CORES_WAIT_S", 60.0)
    monkeypatch.setattr(neuron_model, "CORES_NAP_S", 0.0)
    monkeypatch.setattr(plan, "holders", lambda: holder.communicate() and [])  # it ends while we wait
    batch = Batch(load(tmp_path))
    batch.join(0, [5, 6])
    assert batch.leave(0) == alone([5, 6], 3)


def test_who_holds_the_cores_is_named_when_he_does_not_let_go(tmp_path, monkeypatch, holder):
    tools = tmp_path / "tools"
    tools.mkdir()
    processes = [{"pid": holder.pid, "command": "python3 serve.py", "neuron_runtime_version": "2"}]
    listed = [{"neuron_device": 0, "nc_count": 2, "neuron_processes": processes}]
    (tools / "neuron-ls").write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(listed)}\nEND\n")
    (tools / "neuron-ls").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    message = refusal(tmp_path)
    assert message.startswith(f"the cores are held by another process (python3 with pid {holder.pid})")
    assert "NEURON_RT_VISIBLE_CORES" in message


# What a machine is given when nothing is said


def test_sizes_that_are_left_open_are_chosen_for_the_machine(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(plan, "detect", lambda: plan.Machine(2, "inf2", "inf2.xlarge", 16 << 30, "sysfs"))
    model = load(tmp_path, LLAMA | {"max_position_embeddings": 512}, max_total_tokens=None, max_input_tokens=None)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (plan.MAX_BATCH_SIZE, 512, 511)
    assert os.environ["NEURON_RT_NUM_CORES"] == "2"
    assert "inf2.xlarge: tp_degree 2 of 2 cores, batch size 32, length 512" in caplog.text


def test_what_cannot_fit_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "detect", lambda: plan.Machine(2, "inf2", "inf2.xlarge", 16 << 30, "sysfs"))
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LLAMA | large | {"num_key_value_heads": 8}))
    with pytest.raises(ConfigError, match=r"does not fit on 2 cores: .* GiB a core .*--tp-degree"):
        serve(tmp_path / "large")


def test_a_window_that_slides_bounds_the_length_that_is_chosen(tmp_path):
    model = load(tmp_path, FAMILIES["mistral"] | {"sliding_window": 20}, max_total_tokens=None, max_input_tokens=None)
    assert model.max_total_tokens == 20


# Compiled models


def compiled(tmp_path, *flags, config=LLAMA):
    """What `compile` makes of a checkpoint, in this process."""
    folder = checkpoint(tmp_path / "model", config)
    byte_tokenizer(folder)
    output = tmp_path / "compiled"
    words = ["--model-id", str(folder), "--output", str(output), "--tp-degree", "2", "--max-total-tokens", str(WINDOW), *flags]
    assert export.main(words) == 0
    fake.restart()  # what was compiled by this process is forgotten
    return output


def complaint(capsys, *words):
    assert export.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_compiled_model_is_served_without_compiling(tmp_path):
    output = compiled(tmp_path, "--max-batch-size", "4")
    model = serve(output)
    assert not fake.compiles
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (4, WINDOW, WINDOW - 1)
    batch = Batch(model)
    batch.join(3, [5, 6])
    batch.step()
    assert batch.leave(3) == alone([5, 6], 4)


def test_a_compiled_model_is_compiled_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_CORES", "0")
    assert list((compiled(tmp_path) / "compiled").glob("*.neff"))


def test_a_compiled_model_may_be_served_with_smaller_limits(tmp_path):
    output = compiled(tmp_path, "--max-batch-size", "4", "--prefill-buckets", "8", "--position-buckets", "8,16")
    model = serve(output, max_batch_size=2, max_total_tokens=20, max_input_tokens=10)
    assert not fake.compiles
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (2, 20, 10)
    batch = Batch(model)
    batch.join(0, list(range(1, 11)))
    batch.join(1, [7])
    for _ in range(5):
        batch.step()
    assert batch.leave(0) == alone(range(1, 11), 16)
    assert batch.leave(1) == alone([7], 7)


def test_a_compiled_model_holds_the_weights_of_a_local_checkpoint_once(tmp_path):
    weights = compiled(tmp_path) / "checkpoint" / "model.safetensors"
    assert weights.samefile(tmp_path / "model" / "model.safetensors")
    assert {path.name for path in (tmp_path / "compiled").iterdir()} >= {"config.json", "tokenizer.json", "compiled"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch_size": 8}, "--max-batch-size 8 (MAX_BATCH_SIZE, HF_BATCH_SIZE) is more than the 4 slots"),
        ({"dtype": "float32"}, "which was compiled for bfloat16"),
        ({"tp_degree": 1}, "which was compiled for 2"),
        ({"quantize": "int8"}, "which was compiled for none"),
    ],
    ids=str,
)
def test_settings_that_contradict_a_compiled_model_are_refused(tmp_path, settings, told):
    output = compiled(tmp_path, "--max-batch-size", "4")
    with pytest.raises(ConfigError) as refused:
        serve(output, **settings)
    assert told in str(refused.value) and str(output) in str(refused.value)


def test_a_compiled_model_needs_the_cores_it_was_compiled_for(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    with pytest.raises(ConfigError, match=r"--tp-degree 2 .* needs more cores than the 1 that there are"):
        serve(output)


def test_a_program_that_is_not_there_is_one_line(tmp_path):
    output = compiled(tmp_path)
    next((output / "compiled").glob("*.neff")).unlink()
    with pytest.raises(ModelError, match=r"lacks a program of this model.*compile it again") as refused:
        serve(output)
    assert "\n" not in str(refused.value)


def test_programs_of_another_compiler_or_library_are_refused_with_both_versions(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setattr(neuronxcc, "__version__", "2.16.372.0")
    with pytest.raises(ConfigError, match=r"compiled by neuronx-cc 2\.20.*, and here is 2.16.372.0, which is older"):
        serve(output)
    monkeypatch.undo()


def test_int8_comes_from_the_manifest(tmp_path):
    model = serve(compiled(tmp_path, "--quantize", "int8"))
    assert model._model.neuron_config.quant.quant_dtype == "s8"


def test_where_tokens_are_chosen_comes_from_the_manifest(tmp_path):
    output = compiled(tmp_path, "--sampling", "device", "--max-batch-size", "4")
    model = serve(output, max_batch_size=2)
    assert model.sampling == "device" and not fake.compiles
    model.set_sampling(1, 1, 1.0, 1.0)
    assert int(model.prefill(1, [5, 6])) == alone([5, 6], 3)[-1]
    with pytest.raises(ConfigError, match=r"--sampling host \(SAMPLING\) contradicts"):
        serve(output, sampling="host")


def optimum(tmp_path, config=LLAMA, **section):
    """A folder as optimum-neuron leaves it, with programs for what it would ask the library for."""
    told = {"task": "text-generation", "batch_size": 4, "num_cores": 2, "auto_cast_type": "bf16", "sequence_length": WINDOW}
    told |= {"compiler_type": "neuronx-cc", "compiler_version": "2.16.372.0", "checkpoint_id": None} | section
    folder = tmp_path / "optimum"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"neuron": told}))
    checkpoint(folder / "checkpoint", config)
    library = sys.modules["transformers_neuronx"]
    lengths, options = {"n_positions": WINDOW}, {"attention_layout": "BSH", "fuse_qkv": True}
    if told["batch_size"] > 1:
        lengths = {"n_positions": [WINDOW], "context_length_estimate": [WINDOW]}
        options["continuous_batching"] = library.ContinuousBatchingConfig(batch_size_for_shared_caches=told["batch_size"])
    model = library.LlamaForSampling.from_pretrained(
        str(folder / "checkpoint"),
        batch_size=told["batch_size"],
        tp_degree=2,
        amp="bf16",
        neuron_config=library.NeuronConfig(**options),
        **lengths,
    )
    model.cpu_compile()
    model.save(str(folder / "compiled"))
    fake.restart()
    return folder


@pytest.mark.parametrize("batch_size", [4, 1])
def test_what_optimum_neuron_compiled_is_served_as_it_is(tmp_path, batch_size):
    model = serve(optimum(tmp_path, batch_size=batch_size))
    assert not fake.compiles
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (batch_size, WINDOW, WINDOW - 1)
    for prompt in ([5, 6, 7], [8], [9] * (WINDOW - 2)):
        batch = Batch(model)
        batch.join(0, prompt)
        batch.step()
        assert batch.leave(0) == alone(prompt, len(prompt) + 2)


def test_what_optimum_neuron_compiled_for_batches_that_begin_together_is_refused(tmp_path):
    folder = optimum(tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"mixtral"'))
    with pytest.raises(ModelError, match="compiled for 4 requests that all begin together"):
        serve(folder)


def test_a_folder_without_weights_names_what_it_lacks(tmp_path):
    folder = optimum(tmp_path)
    (folder / "checkpoint").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="has no folder `checkpoint` and names no checkpoint_id"):
        serve(folder)


def test_weights_are_fetched_by_the_id_and_the_commit_that_a_compiled_model_names(tmp_path, monkeypatch):
    folder = optimum(tmp_path, checkpoint_id="someone/llama", checkpoint_revision="abc")
    elsewhere = (folder / "checkpoint").rename(tmp_path / "elsewhere")
    asked = []
    monkeypatch.setattr(neuron_model, "fetch_checkpoint", lambda config, *named: asked.append(named) or elsewhere)
    assert serve(folder).batch_size == 4
    assert asked == [("someone/llama", "abc")]


def test_a_plain_checkpoint_is_compiled_once(tmp_path, caplog):
    caplog.set_level("INFO")
    phases = []
    load(tmp_path, max_batch_size=2, announce=phases.append)
    programs = len(fake.compiles)
    assert programs and phases == ["compiling"]
    assert "holds none of this model" in caplog.text and "Compiled prompts up to 23 in" in caplog.text
    fake.restart()
    load(tmp_path, max_batch_size=2, announce=phases.append)
    assert not fake.compiles and phases == ["compiling"]
    fake.restart()
    caplog.clear()
    load(tmp_path, max_batch_size=3)
    assert len(fake.compiles) == programs
    assert "other values: batch_size 3 instead of 2" in caplog.text


def test_programs_that_cannot_be_kept_do_not_keep_a_model_from_being_served(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "file"))
    assert load(tmp_path).batch_size
    assert "cannot be kept, so each start compiles them anew" in caplog.text


def test_kept_programs_that_do_not_fit_any_more_are_removed_and_compiled_at_the_next_start(tmp_path):
    load(tmp_path)
    (entry,) = (tmp_path / "cache" / "neuron-textgen").iterdir()
    next(entry.glob("*.neff")).unlink()
    fake.restart()
    with pytest.raises(DeviceLost, match="the next start compiles them"):
        load(tmp_path)
    fake.restart()
    load(tmp_path)
    assert fake.compiles


@pytest.mark.parametrize("fault", ["oom", "init"])
def test_a_device_that_fails_costs_no_kept_programs(tmp_path, monkeypatch, fault):
    load(tmp_path)
    kept = sorted((tmp_path / "cache").rglob("*.neff"))
    fake.restart()
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    refusal(tmp_path)
    assert sorted((tmp_path / "cache").rglob("*.neff")) == kept


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model-id", "{model}"], "--output is missing"),
        (["--model-id", "{model}", "--output", "{model}"], "is there and not empty"),
        (["--model-id", "{model}", "--output", "{output}"], "there is no Neuron device here whose cores could be counted"),
        (
            ["--model-id", "{model}", "--output", "{output}", "--device", "cpu"],
            "--device cpu: programs are compiled for Neuron",
        ),
        (["--model-id", "{model}", "--output", "{output}", "--tp-degree", "3"], "tp_degree 3 cannot be had with 3 cores"),
        (["--model-id", "{model}", "--output", "{output}", "--max-batch", "3"], "unknown argument '--max-batch'"),
        (["--model-id", "{compiled}", "--output", "{output}", "--tp-degree", "2"], "is compiled already"),
    ],
    ids=str,
)
def test_what_compile_cannot_do_is_one_line(tmp_path, capsys, words, told):
    places = {"model": checkpoint(tmp_path / "model"), "output": tmp_path / "output", "compiled": tmp_path / "compiled"}
    if "{compiled}" in words:
        compiled(tmp_path)
        capsys.readouterr()
    assert told in complaint(capsys, *(word.format(**places) for word in words))
    assert not places["output"].exists()


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "compile")
    folder = checkpoint(tmp_path / "model")
    words = ["--model-id", str(folder), "--output", str(tmp_path / "deep" / "output"), "--tp-degree", "1"]
    assert export.main(words) == 2
    assert "the compiler ran out of the machine's memory" in capsys.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "deep").iterdir()) == []


# The whole server


@pytest.fixture
def on_neuron(tmp_path):
    folder = checkpoint(tmp_path / "model")
    byte_tokenizer(folder)

    def serve(flags=("--device", "neuron"), **environment):
        environment = {
            "PYTHONPATH": FAKE,
            "FAKE_NEURON_STATE_DIR": str(tmp_path / "machine"),
            "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        } | environment
        limits = ("--max-total-tokens", "60", "--max-batch-size", "4")
        return Server("--model-id", str(folder), *limits, *flags, **environment)

    return serve


def test_the_whole_server_serves_a_crowd_on_neuron(on_neuron, tmp_path):
    with on_neuron() as server:
        server.wait_ready()
        assert json.loads(server.get("/info")[1])["model_device_type"] == "neuron"
        streams = [server.request("POST", "/generate_stream", {"inputs": text}) for text in ("a", "bc", "d" * 40, "e", "fgh")]
        for text, stream in zip(("a", "bc", "d" * 40, "e", "fgh"), streams):
            status, answer = server.generate(text)
            assert status == 200
            assert list(events(stream))[-1]["generated_text"] == answer["generated_text"]
        status, refused = server.generate("a", decoder_input_details=True)
        assert (status, "`decoder_input_details` is not supported" in refused["error"]) == (422, True)
        server.wait_idle()
        assert server.stop() == 0
    assert not (tmp_path / "machine" / "violations.log").exists()


def test_the_whole_server_samples_on_the_device(on_neuron, tmp_path):
    texts = ("a", "bc", "d" * 40, "e", "fgh")
    with on_neuron() as server:
        server.wait_ready()
        assert json.loads(server.get("/info")[1])["sampling"] == "host"
        on_host = [server.generate(text, details=True)[1] for text in texts]
        assert server.stop() == 0
    with on_neuron(SAMPLING="device", FAKE_NEURON_STEP_S="0.005") as server:
        server.wait_ready()
        assert json.loads(server.get("/info")[1])["sampling"] == "device"
        body = {"inputs": "zz", "parameters": {"temperature": 3.0, "top_k": 200, "max_new_tokens": 50}}
        noise = [server.request("POST", "/generate_stream", body) for _ in range(2)]
        streams = [server.request("POST", "/generate_stream", {"inputs": text}) for text in texts]
        for told, stream in zip(on_host, streams):
            tokens = list(events(stream))
            assert tokens[-1]["generated_text"] == told["generated_text"]
            assert [event["token"]["id"] for event in tokens] == [token["id"] for token in told["details"]["tokens"]]
            assert {event["token"]["logprob"] for event in tokens} == {None}
        assert len({list(events(stream))[-1]["generated_text"] for stream in noise}) == 2
        status, answer = server.generate("a", details=True, temperature=0.5)
        assert (status, answer["details"]["seed"]) == (200, None)
        for parameters in ({"do_sample": True, "seed": 1}, {"repetition_penalty": 1.1}, {"top_n_tokens": 2}):
            status, refused = server.generate("a", **parameters)
            name = list(parameters)[-1]
            assert status == 422
            assert refused["error"].endswith(f"`{name}` needs SAMPLING=host: this server samples on the device")
        server.wait_idle()
        assert server.stop() == 0
    assert not (tmp_path / "machine" / "violations.log").exists()


def test_when_the_device_fails_everyone_is_told_and_the_container_ends(on_neuron):
    with on_neuron(FAKE_NEURON_FAIL="step:9", FAKE_NEURON_STEP_S="0.02") as server:
        server.wait_ready()
        stream = list(events(server.request("POST", "/generate_stream", {"inputs": "abc", "parameters": {"stop": []}})))
        assert stream[-1].get("error_type") in ("generation", None)
        if "error_type" not in stream[-1]:  # that text ended before: the next one meets the fault
            assert server.generate("b")[0] in (424, 503)
        assert server.wait_exit() == 1
        assert "the device is lost" in server.log


def test_what_cannot_be_served_on_neuron_ends_the_boot_with_one_line(on_neuron):
    with on_neuron(FAKE_NEURON_FAIL="oom") as server:
        assert server.wait_exit() == 2
        assert "the model cannot be brought onto the device: the device has too little memory" in server.log
        assert "Traceback" not in server.log


def test_a_machine_that_has_the_library_and_no_device_is_not_served_by_its_cpu_without_a_word(on_neuron):
    with on_neuron(flags=("--device", "auto")) as server:
        assert server.wait_exit() == 2
        assert "is here and no Neuron device: in a container pass it with --device=/dev/neuron0" in server.log


def test_without_the_library_it_says_what_is_needed(tmp_path):
    folder = checkpoint(tmp_path / "model")
    byte_tokenizer(folder)
    with Server("--model-id", str(folder), "--device", "neuron") as server:
        assert server.wait_exit() == 2
        assert "--device neuron needs transformers-neuronx" in server.log
