"""NeuronModel and the verb `compile` on a fake of transformers-neuronx, which raises where the library is silently wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import Server, events, wait_until

from config import DEVICE_TOP_K, Config
from manifest import Manifest
from models.base import Chunk, DeviceLost, ModelError, SampledIds
from models.cache import evict, locked
from models.machine import Machine
from run import HERE, ConfigError

FAKE = str(Path(__file__).parents[1] / "fakes" / "neuron")
sys.path.insert(0, FAKE)
import neuronxcc  # noqa: E402
import transformers_neuronx  # noqa: E402
from transformers_neuronx import fake  # noqa: E402

from models import compile as verb  # noqa: E402
from models import neuron  # noqa: E402
from models.artifact import buckets  # noqa: E402
from models.neuron import Build, NeuronModel, explain, legacy_config  # noqa: E402

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
}
BATCHING = ["llama", "mistral", "mixtral"]


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with two cores, empty caches, and no call that the library would silently answer wrongly."""
    for name in [name for name in os.environ if name.startswith(("FAKE_NEURON_", "NEURON_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE_NEURON_STATE_DIR", str(tmp_path / "machine"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "")  # so that a value that the model sets is undone
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    monkeypatch.setattr(neuron, "CORES_WAIT_S", -1.0)
    monkeypatch.setattr("logs.set_up", lambda level, as_json: None)  # the logs of this process are pytest's
    fake.restart()
    yield
    fake.restart()
    os.environ.pop("NEURON_RT_NUM_CORES", None)
    assert not fake.violations


@pytest.fixture
def built(monkeypatch):
    """The NeuronConfig of every model of the library that is built."""
    configs, make = [], transformers_neuronx.LlamaForSampling.from_pretrained
    monkeypatch.setattr(
        transformers_neuronx.LlamaForSampling,
        "from_pretrained",
        lambda *arguments, **options: configs.append(options["neuron_config"]) or make(*arguments, **options),
    )
    return configs


def checkpoint(folder, config=LLAMA):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def load(tmp_path, config=LLAMA, **settings):
    settings = {"max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1} | settings
    return serve(checkpoint(tmp_path / "model", config), **settings)


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
    """Sequences in slots, each continued greedily, or with what the device samples, as the worker does it."""

    def __init__(self, model):
        self.model = model
        self.texts = {}  # slot → all tokens so far

    def join(self, slot, prompt, sampling=GREEDY):
        if self.model.sampling == "device":
            self.model.set_sampling(slot, *sampling)
        self.texts[slot] = [*prompt, *self._next_tokens([Chunk(slot, prompt, 0)])]

    def step(self):
        slots = sorted(self.texts)
        chunks = [Chunk(slot, self.texts[slot][-1:], len(self.texts[slot]) - 1) for slot in slots]
        for slot, token in zip(slots, self._next_tokens(chunks)):
            self.texts[slot].append(token)

    def _next_tokens(self, chunks):
        output = self.model.forward(chunks)
        if self.model.sampling == "device":
            assert isinstance(output, SampledIds) and output.ids.shape == (len(chunks),) and output.ids.dtype == np.int64
            return output.ids.tolist()
        assert output.shape == (len(chunks), VOCABULARY)
        if self.model.dtype == "bfloat16":
            assert output.dtype == np.uint16
            output = (output.astype(np.uint32) << 16).view(np.float32)
        assert output.dtype == np.float32
        return output.argmax(-1).tolist()

    def leave(self, slot):
        return self.texts.pop(slot)


def alone(prompt, length):
    """What a prompt must become in an otherwise empty batch."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(fake.expected_logits(tokens, VOCABULARY).argmax()))
    return tokens


def first_token(model, slot, prompt):
    return int(model.forward([Chunk(slot, prompt, 0)]).ids[0])


# A batch


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


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 22, 23])
def test_the_text_is_the_same_across_the_borders_of_buckets(tmp_path, length):
    batch = Batch(load(tmp_path, max_batch_size=2, prefill_buckets=(8, 16), position_buckets=(8, 16)))
    batch.join(0, [3, 4])
    batch.join(1, list(range(1, length + 1)))
    while len(batch.texts[1]) < WINDOW:
        batch.step()
    assert batch.leave(1) == alone(range(1, length + 1), WINDOW)
    text = batch.leave(0)
    assert text == alone([3, 4], len(text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_stay_as_they_are_when_the_next_step_runs(tmp_path, dtype):
    model = load(tmp_path, max_batch_size=2, dtype=dtype)
    outputs = [model.forward([Chunk(0, [5, 6], 0)]), model.forward([Chunk(0, [7], 2)])]
    copies = [output.copy() for output in outputs]
    model.forward([Chunk(0, [8], 3)])
    assert all(np.array_equal(output, copy) for output, copy in zip(outputs, copies))


def test_a_slot_that_a_step_did_not_name_does_not_go_on(tmp_path):
    batch = Batch(load(tmp_path, max_batch_size=2))
    batch.join(0, [5, 6])
    batch.join(1, [7, 8])
    forgotten = batch.leave(1)
    batch.step()
    batch.texts[1] = forgotten
    with pytest.raises(AssertionError, match=r"slots \[0, 1\] hold \[\d, None\] positions"):
        batch.step()
    batch.join(1, [7])  # a new prompt there begins anew
    with pytest.raises(AssertionError, match=r"slots \[0, 1\] hold \[3, 1\] positions"):
        batch.model.forward([Chunk(0, [1], 3), Chunk(1, [1], 2)])


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


# Sampling on the device


@pytest.fixture
def updates(monkeypatch):
    """Every update of the device's sampling parameters: top_k, top_p and temperature of each slot."""
    seen = []
    update = transformers_neuronx.LlamaForSampling.update_generation_config

    def listen(model, new):
        seen.append(list(zip(new.top_k, new.top_p, new.temperature)))
        update(model, new)

    monkeypatch.setattr(transformers_neuronx.LlamaForSampling, "update_generation_config", listen)
    return seen


JOINS = st.tuples(  # slot, prompt length, steps until the next one joins, sampling
    st.integers(0, 7), st.integers(1, 20), st.integers(0, 5), st.sampled_from([GREEDY, (0, 1.0, 5.0), (9, 0.7, 2.0)])
)


@pytest.mark.parametrize("sampling", ["host", "device"])
@given(schedule=st.lists(JOINS, min_size=1, max_size=25))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schedule_over_eight_slots_gives_every_greedy_request_its_own_text(tmp_path, updates, sampling, schedule):
    """Beside sampled requests as well; and the device is updated only when the parameters of a slot change."""
    fake.restart()
    updates.clear()
    batch, prompts, parameters, changes = (Batch(load(tmp_path, max_batch_size=8, sampling=sampling)), {}, [GREEDY] * 8, 0)

    def leave(slot):
        text = batch.leave(slot)
        assert text[: len(prompts[slot])] == prompts[slot]
        assert parameters[slot] != GREEDY or text == alone(prompts[slot], len(text))

    for n, (slot, length, steps, new) in enumerate(schedule):
        if slot in batch.texts:
            leave(slot)
        prompts[slot] = [n % VOCABULARY] * length
        if sampling == "device":
            changes += parameters[slot] != new
            parameters[slot] = new
        batch.join(slot, prompts[slot], new)
        for _ in range(steps):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                leave(full)
            if batch.texts:
                batch.step()
    for slot in list(batch.texts):
        leave(slot)
    assert len(updates) == changes
    expected = [(top_k or min(VOCABULARY, DEVICE_TOP_K), top_p, temperature) for top_k, top_p, temperature in parameters]
    assert not updates or updates[-1] == expected


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


def test_with_a_small_vocabulary_the_device_samples_from_all_of_it(tmp_path, updates, built):
    load(tmp_path, LLAMA | {"vocab_size": 100}, sampling="device").set_sampling(0, 256, 1.0, 1.0)
    assert built[0].on_device_generation.global_top_k == 100 and updates[0][0] == (100, 1.0, 1.0)


def test_a_sampled_slot_is_random_from_its_first_token_on(tmp_path):
    model = load(tmp_path, max_batch_size=2, sampling="device")
    likeliest = alone([5, 6], 3)[-1]
    model.set_sampling(1, 0, 1.0, 50.0)
    assert len({first_token(model, 1, [5, 6]) for _ in range(20)}) > 5
    model.set_sampling(0, *GREEDY)
    assert {first_token(model, 0, [5, 6]) for _ in range(20)} == {likeliest}


def test_a_device_that_fails_during_an_update_is_lost(tmp_path, monkeypatch):
    model = load(tmp_path, max_batch_size=2, sampling="device")

    def fail(model, new):
        raise IndexError

    monkeypatch.setattr(transformers_neuronx.LlamaForSampling, "update_generation_config", fail)
    with pytest.raises(DeviceLost):
        model.set_sampling(0, 5, 1.0, 1.0)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "mistral"}))
def test_sampling_on_the_device_is_refused_for_families_without_it(tmp_path, family):
    assert refusal(tmp_path, FAMILIES[family], sampling="device") == (
        f"--sampling device (SAMPLING) is not supported for {family} models on Neuron; give host"
    )
    assert load(tmp_path, FAMILIES[family], sampling="host").sampling == "host"


# What is compiled


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        (None, 128, [128]),
        (None, 129, [128, 129]),
        (None, 2047, [128, 256, 512, 1024, 2047]),
        ((64, 512), 2048, [64, 512, 2048]),
        ((2048,), 2048, [2048]),
    ],
)
def test_buckets_reach_up_to_the_limit(given, limit, expected):
    assert buckets(limit, given, "--prefill-buckets") == tuple(expected)


def test_buckets_above_the_limit_are_refused(tmp_path):
    assert "--prefill-buckets 64 is more than the limit of 24 tokens" in refusal(tmp_path, prefill_buckets=(64,))
    assert "--position-buckets 64 is more than the limit of 24 tokens" in refusal(tmp_path, position_buckets=(64,))


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_rotary_base_reaches_the_library_in_both_forms_of_the_config(tmp_path, version, theta):
    """With the form of transformers 5 it would silently use 10000; the fake reports that as a violation."""
    config = LLAMA | {"rope_theta": theta}
    if version == 5:
        del config["rope_theta"], config["torch_dtype"]
        config |= {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "dtype": "bfloat16"}
    assert load(tmp_path, config).dtype == "bfloat16"
    (written,) = tmp_path.glob("*/checkpoint/config.json")
    assert json.loads(written.read_text())["rope_theta"] == theta


def test_a_scaled_rotary_base_keeps_its_scaling():
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    legacy = legacy_config({"model_type": "llama", "rope_parameters": rope})
    assert legacy["rope_theta"] == 5e5
    scaling = {"rope_type": "llama3", "type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert legacy["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ({"model_type": "qwen2"}, {}, "model_type 'qwen2' is not served on Neuron; these are: llama, mistral"),
        ({"model_type": "gpt2"}, {}, "gpt2 models are not served on Neuron any more"),
        ({"head_dim": 16}, {}, "head_dim 16 is not served on Neuron"),
        ({"attention_bias": True}, {}, "attention_bias is True and transformers-neuronx computes False"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            {},
            "rope_scaling is yarn and transformers-neuronx computes default or llama3",
        ),
        ({"model_type": "mistral", "sliding_window": 20}, {}, "24 (MAX_TOTAL_TOKENS) is more than the 20 positions"),
        ({}, {"quantize": "int4"}, "--quantize int4 (QUANTIZE) is not supported on Neuron; give int8 or none"),
        (
            {"model_type": "mixtral"},
            {"neuron_config": ("on_device_embedding=true",)},
            "--neuron-config on_device_embedding=true (NEURON_CONFIG) is not supported for mixtral models on Neuron",
        ),
        (
            {"num_key_value_heads": 4},
            {"neuron_config": ("shard_over_sequence=true",), "tp_degree": 2},
            "--neuron-config shard_over_sequence=true (NEURON_CONFIG) needs more heads than its 4 key-value heads",
        ),
        (
            {"num_key_value_heads": 2},
            {"neuron_config": ("shard_over_sequence=true",), "tp_degree": 2},
            "needs more heads than its 2 key-value heads, and a tp_degree of two or more times 2; not 4 and 2",
        ),
        ({"rope_parameters": "x"}, {}, "config.json: rope_parameters is 'x' and should be an object"),
        ({"rope_scaling": ["x"]}, {}, "config.json: rope_scaling is ['x'] and should be an object"),
        ({"quantization_config": "gptq"}, {}, "config.json: quantization_config is 'gptq' and should be an object"),
        ({"model_type": "mistral3", "text_config": LLAMA}, {}, "model_type 'mistral3' is not served on Neuron"),
        ({}, {"tp_degree": 4}, "the cores are held by another process"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path, config, settings, reason):
    assert reason in refusal(tmp_path, LLAMA | config, **settings)


# Cores and the device


def test_the_runtime_takes_no_more_cores_than_the_model_needs(tmp_path):
    load(tmp_path, tp_degree=1)
    assert os.environ["NEURON_RT_NUM_CORES"] == "1"


@pytest.mark.parametrize(("visible", "cores"), [("0", 1), ("1", 1), ("0-1", 2), ("0,1", 2)])
def test_the_visible_cores_are_counted_and_left_as_they_are(tmp_path, monkeypatch, visible, cores):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    load(tmp_path)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == visible
    assert "NEURON_RT_NUM_CORES" not in os.environ
    if cores == 1:
        assert "needs more cores than the 1 that this process may use" in refusal(tmp_path, tp_degree=2)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("init", "no Neuron device can be used here"), ("oom", "the device has too little memory"), ("compile", "compiler")],
)
def test_a_failure_of_the_device_at_boot_is_explained_in_one_line(tmp_path, monkeypatch, fault, reason):
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize("fault", ["prefill:2", "step:2"])
def test_an_error_of_the_device_means_that_it_is_lost(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    batch = Batch(load(tmp_path, max_batch_size=2))
    batch.join(0, [5, 6])
    with pytest.raises(DeviceLost):
        for n in range(3):
            batch.step()
            batch.join(1, [7, n])


def test_without_the_library_the_boot_names_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers_neuronx", None)
    assert "--device neuron needs transformers-neuronx" in refusal(tmp_path)


def test_known_errors_of_the_runtime_are_explained():
    explained = explain(RuntimeError('nrt_tensor_allocate status=4 message="Allocation Failure"'))
    assert explained.startswith("the device has too little memory for this model")
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


def test_the_model_waits_for_cores_that_another_process_holds(tmp_path, monkeypatch, holder, caplog):
    monkeypatch.setattr(neuron, "CORES_WAIT_S", 60.0)
    monkeypatch.setattr(neuron.time, "sleep", lambda seconds: holder.communicate())  # it ends meanwhile
    batch = Batch(load(tmp_path))
    batch.join(0, [5, 6])
    assert batch.leave(0) == alone([5, 6], 3)
    assert caplog.text.count("The NeuronCores are held by another process; trying again") == 1


def test_a_process_that_keeps_the_cores_ends_the_boot_with_what_helps(tmp_path, holder):
    message = refusal(tmp_path)
    assert message.startswith("the cores are held by another process, also after") and "NEURON_RT_VISIBLE_CORES" in message


# Sizes for a machine


INF2_XLARGE = Machine(2, "inf2", "inf2.xlarge", 16 << 30)


def test_sizes_that_are_left_open_are_chosen_for_the_machine(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(neuron, "detect", lambda: INF2_XLARGE)
    model = load(tmp_path, LLAMA | {"max_position_embeddings": 512}, max_total_tokens=None, max_input_tokens=None)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (32, 512, 511)
    assert os.environ["NEURON_RT_NUM_CORES"] == "2"
    assert "On inf2.xlarge with 2 cores: tp_degree 2, batch size 32, length 512: weights" in caplog.text


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(neuron, "detect", lambda: INF2_XLARGE)
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LLAMA | large | {"num_key_value_heads": 8}))
    with pytest.raises(ConfigError, match=r"does not fit on 2 cores: .* GiB.*--tp-degree 12 would fit"):
        serve(tmp_path / "large")


def test_a_sliding_window_limits_the_length_that_is_chosen(tmp_path):
    model = load(tmp_path, FAMILIES["mistral"] | {"sliding_window": 20}, max_total_tokens=None, max_input_tokens=None)
    assert model.max_total_tokens == 20


# Compiled models


def compiled(tmp_path, *flags, config=LLAMA):
    """What `compile` makes of a checkpoint, in this process."""
    folder = checkpoint(tmp_path / "model", config)
    byte_tokenizer(folder)
    output = tmp_path / "compiled"
    words = ["--model-id", str(folder), "--output", str(output), "--tp-degree", "2", "--max-total-tokens", str(WINDOW), *flags]
    assert verb.main(words) == 0
    fake.restart()  # forgets what this process compiled
    return output


def test_a_model_is_compiled_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NEURON_CORES", "0")
    assert list((compiled(tmp_path) / "compiled").glob("*.neff"))


@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 2, "max_total_tokens": 20, "max_input_tokens": 10}])
def test_a_compiled_model_is_served_without_compiling_with_its_limits_or_smaller_ones(tmp_path, limits):
    output = compiled(tmp_path, "--max-batch-size", "4", "--prefill-buckets", "8", "--position-buckets", "8,16")
    model = serve(output, **limits)
    assert not fake.compiles
    expected = limits or {"max_batch_size": 4, "max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1}
    assert [model.batch_size, model.max_total_tokens, model.max_input_tokens] == list(expected.values())
    batch = Batch(model)
    batch.join(0, list(range(1, 11)))
    batch.join(1, [7])
    for _ in range(5):
        batch.step()
    assert batch.leave(0) == alone(range(1, 11), 16)
    assert batch.leave(1) == alone([7], 7)


def test_a_compiled_model_links_the_weights_of_a_local_checkpoint(tmp_path):
    weights = compiled(tmp_path) / "checkpoint" / "model.safetensors"
    assert weights.samefile(tmp_path / "model" / "model.safetensors")
    assert {path.name for path in (tmp_path / "compiled").iterdir()} >= {"config.json", "tokenizer.json", "compiled"}


def test_a_compiled_model_needs_the_cores_that_it_was_compiled_for(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    with pytest.raises(ConfigError, match=r"--tp-degree 2 .* needs more cores than the 1 that this process may use"):
        serve(output)


@pytest.mark.parametrize(
    ("damage", "reason"), [(Path.unlink, "is missing"), (lambda path: path.write_text(""), "is damaged: it has 0 bytes")]
)
def test_a_missing_or_damaged_program_is_named_in_one_line(tmp_path, damage, reason):
    output = compiled(tmp_path)
    program = next((output / "compiled").glob("*.neff"))
    damage(program)
    with pytest.raises(ModelError, match=f"^{program} {reason}.*; copy {output} again, or compile the model again$"):
        serve(output)


def test_programs_of_a_newer_compiler_are_refused_with_both_versions(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setattr(neuronxcc, "__version__", "2.16.372.0")
    with pytest.raises(ConfigError, match=r"compiled by neuronx-cc 2\.20.*, newer than the installed 2.16.372.0"):
        serve(output)


def test_int8_comes_from_the_manifest(tmp_path, built):
    serve(compiled(tmp_path, "--quantize", "int8"))
    assert built[-1].quant.quant_dtype == "s8"


OPTIONS = ("collectives_layout=BSH", "on_device_embedding=true", "sequence_parallel_norm_threshold=512")


def test_options_of_the_library_reach_it_and_come_from_the_manifest(tmp_path, built):
    output = compiled(tmp_path, "--neuron-config", ",".join(OPTIONS))
    serve(output)
    serve(output, neuron_config=OPTIONS[:1])
    assert not fake.compiles
    for config in built:
        assert (config.collectives_layout, config.on_device_embedding) == ("BSH", True)
        assert (config.sequence_parallel_norm_threshold, config.sequence_parallel_norm) == (512, False)
    assert len(built) == 3
    with pytest.raises(ConfigError, match=r"--neuron-config shard_over_sequence=true \(NEURON_CONFIG\) contradicts"):
        serve(output, neuron_config=("shard_over_sequence=true",))


def test_programs_with_other_options_of_the_library_are_compiled_anew_and_kept_beside(tmp_path, caplog):
    caplog.set_level("INFO")
    for options in (None, OPTIONS, None, OPTIONS):
        load(tmp_path, neuron_config=options)
        fake.restart()
    assert caplog.text.count("Compiling, because") == 2
    assert "neuron_config collectives_layout=BSH,on_device_embedding=true" in caplog.text


def test_an_option_that_is_not_known_in_a_manifest_is_refused(tmp_path):
    output = compiled(tmp_path, "--neuron-config", OPTIONS[0])
    path = output / "config.json"
    path.write_text(path.read_text().replace("collectives_layout=BSH", "collectives_layout=SBH"))
    with pytest.raises(ConfigError, match=r"`neuron` cannot be served .*neuron_config"):
        serve(output)


def test_sampling_on_the_device_comes_from_the_manifest(tmp_path):
    output = compiled(tmp_path, "--sampling", "device", "--max-batch-size", "4")
    model = serve(output, max_batch_size=2)
    assert model.sampling == "device" and not fake.compiles
    model.set_sampling(1, 1, 1.0, 1.0)
    assert first_token(model, 1, [5, 6]) == alone([5, 6], 3)[-1]
    with pytest.raises(ConfigError, match=r"--sampling host \(SAMPLING\) contradicts"):
        serve(output, sampling="host")


def optimum(tmp_path, config=LLAMA, **section):
    """A folder as optimum-neuron writes it."""
    section = {
        "task": "text-generation",
        "batch_size": 4,
        "num_cores": 2,
        "auto_cast_type": "bf16",
        "sequence_length": WINDOW,
        "compiler_type": "neuronx-cc",
        "compiler_version": "2.16.372.0",
        "checkpoint_id": None,
    } | section
    folder = tmp_path / "optimum"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"neuron": section}))
    checkpoint(folder / "checkpoint", config)
    return folder


@pytest.mark.parametrize(("family", "slots"), [("llama", 4), ("mixtral", 4)])
def test_a_folder_of_optimum_neuron_is_compiled_with_its_values_once(tmp_path, caplog, family, slots):
    caplog.set_level("INFO")
    folder = optimum(tmp_path, FAMILIES[family])
    for compiles in (True, False):
        fake.restart()
        model = serve(folder)
        assert bool(fake.compiles) == compiles
        assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (slots, WINDOW, WINDOW - 1)
    for prompt in ([5, 6, 7], [8], [9] * (WINDOW - 2)):
        batch = Batch(model)
        batch.join(0, prompt)
        batch.step()
        assert batch.leave(0) == alone(prompt, len(prompt) + 2)
    assert caplog.text.count("The programs of optimum-neuron cannot be loaded") == 2


def test_a_folder_without_weights_names_what_it_lacks(tmp_path):
    folder = optimum(tmp_path)
    (folder / "checkpoint").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="has no folder `checkpoint` and names no checkpoint_id"):
        serve(folder)


def test_weights_are_downloaded_by_the_id_and_the_commit_in_the_manifest(tmp_path, monkeypatch):
    folder = optimum(tmp_path, checkpoint_id="someone/llama", checkpoint_revision="abc")
    elsewhere = (folder / "checkpoint").rename(tmp_path / "elsewhere")
    requested = []
    monkeypatch.setattr(neuron, "fetch_checkpoint", lambda config, *named: requested.append(named) or elsewhere)
    assert serve(folder).batch_size == 4
    assert requested == [("someone/llama", "abc")]


# The cache of `serve`


def test_a_plain_checkpoint_is_compiled_once(tmp_path, caplog):
    caplog.set_level("INFO")
    phases = []
    load(tmp_path, max_batch_size=2, announce=phases.append)
    programs = len(fake.compiles)
    assert programs and phases == ["compiling"]
    assert "holds none of this model" in caplog.text and "Compiling programs for prompts up to 24" in caplog.text
    fake.restart()
    load(tmp_path, max_batch_size=2, announce=phases.append)
    assert not fake.compiles and phases == ["compiling"]
    fake.restart()
    caplog.clear()
    load(tmp_path, max_batch_size=3)
    assert len(fake.compiles) == programs
    assert "other values: batch_size 3 instead of 2" in caplog.text


def test_a_model_whose_programs_cannot_be_kept_is_served(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "file"))
    assert load(tmp_path).batch_size
    assert "cannot be kept, so each start compiles them again" in caplog.text


def test_a_damaged_program_that_was_kept_is_named_and_compiled_again(tmp_path, caplog):
    load(tmp_path)
    (record,) = (tmp_path / "cache" / "neuron-textgen").glob("*/programs.json")
    program = next(record.parent.glob("*.neff"))
    program.write_text("")
    for compiles in (True, False):
        fake.restart()
        load(tmp_path)
        assert bool(fake.compiles) == compiles
    assert caplog.text.count(f"{program} is damaged: it has 0 bytes") == 1


def test_kept_programs_that_lack_one_are_named_and_compiled_again(tmp_path, caplog):
    load(tmp_path)
    (record,) = (tmp_path / "cache" / "neuron-textgen").glob("*/programs.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"files": {}}))  # as of a version that compiles others
    next(record.parent.glob("*.neff")).unlink()
    for compiles in (True, False):
        fake.restart()
        load(tmp_path)
        assert bool(fake.compiles) == compiles
    assert caplog.text.count("a program of this model is missing") == 1


def test_of_two_servers_that_need_the_same_programs_one_compiles_them(tmp_path, monkeypatch):
    waits, loaded = threading.Event(), []
    folder = tmp_path / "cache" / "neuron-textgen"
    load(tmp_path)
    (entry,) = (path.parent for path in folder.glob("*/programs.json"))
    entry.rename(tmp_path / "made")
    fake.restart()
    monkeypatch.setattr("models.cache.logger.info", lambda message, *_: waits.set() if "waiting for it" in message else None)
    with locked(entry.with_suffix(".lock"), "compiling"):
        other = threading.Thread(target=lambda: loaded.append(load(tmp_path)))
        other.start()
        assert waits.wait(60)
        (tmp_path / "made").rename(entry)
    other.join(60)
    assert loaded and not fake.compiles


def test_programs_are_not_removed_while_a_server_loads_them(tmp_path, monkeypatch):
    load(tmp_path, max_batch_size=2)
    fake.restart()
    find_damage, calls = neuron.artifact.find_damage, []

    def another_server_fills_the_cache(entry, files):
        if not calls:
            calls.append(entry)
            newest = entry.with_name("newest")
            newest.mkdir()
            (newest / "programs.json").touch()
            os.utime(newest / "programs.json", (1e10, 1e10))
            evict([newest / "programs.json", entry / "programs.json"], 0.0, "--compile-cache-size")
        return find_damage(entry, files)

    monkeypatch.setattr(neuron.artifact, "find_damage", another_server_fills_the_cache)
    load(tmp_path, max_batch_size=2)
    assert calls and not fake.compiles
    evict([calls[0].with_name("newest") / "programs.json", calls[0] / "programs.json"], 0.0, "--compile-cache-size")
    assert not calls[0].exists()  # once nothing uses it


def test_a_cache_that_another_user_may_write_to_is_refused(tmp_path):
    load(tmp_path)
    (tmp_path / "cache" / "neuron-textgen").chmod(0o777)
    fake.restart()
    assert "neuron-textgen (NEURON_COMPILE_CACHE_URL) can be written to by other users; chmod 700 it" in refusal(tmp_path)


@pytest.mark.parametrize("fault", ["oom", "init"])
def test_a_device_that_fails_costs_no_kept_programs(tmp_path, monkeypatch, fault):
    load(tmp_path)
    kept = sorted((tmp_path / "cache").rglob("*.neff"))
    fake.restart()
    monkeypatch.setenv("FAKE_NEURON_FAIL", fault)
    refusal(tmp_path)
    assert sorted((tmp_path / "cache").rglob("*.neff")) == kept


def test_another_limit_of_prompts_compiles_nothing(tmp_path):
    for limit in (WINDOW - 1, 5, 9):
        fake.restart()
        assert load(tmp_path, max_batch_size=2, max_input_tokens=limit).max_input_tokens == limit
        assert bool(fake.compiles) == (limit == WINDOW - 1)


def test_a_compiled_model_takes_longer_prompts_than_the_limit_that_it_was_compiled_with(tmp_path):
    output = compiled(tmp_path, "--max-input-tokens", "5")
    assert serve(output).max_input_tokens == WINDOW - 1 and not fake.compiles


@pytest.mark.parametrize(("window", "largest"), [(4096, 4096), (1000, 1000)])
def test_the_largest_prompt_bucket_is_the_window_and_the_longest_prompt_one_token_less(tmp_path, window, largest):
    """The library's kernel for long prompts begins at a bucket of 4096."""
    folder = checkpoint(tmp_path / "model", LLAMA | {"max_position_embeddings": window})
    build = Build.decide(Config(model_id=str(folder), device="neuron"), folder, Manifest.read(folder))
    assert max(build.programs.prefill_buckets) == max(build.programs.position_buckets) == largest
    assert build.config.max_input_tokens == window - 1


@pytest.mark.parametrize("size_gb", [1.0, 1e-9])
def test_the_cache_of_programs_is_bounded(tmp_path, size_gb):
    for slots in (2, 3, 4):
        fake.restart()
        load(tmp_path, max_batch_size=slots, compile_cache_size=size_gb)
    assert len(list((tmp_path / "cache" / "neuron-textgen").glob("*/programs.json"))) == (3 if size_gb == 1.0 else 1)


# The verb `compile`


def test_help_names_the_flags_that_decide_what_is_compiled(capsys):
    with pytest.raises(SystemExit) as ended:
        verb.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(flag in printed for flag in ("--output", "--tp-degree", "--position-buckets"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model-id", "{model}"], "--output is missing"),
        (["--model-id", "{model}", "--output"], "argument --output: expected one argument"),
        (["--model-id", "{model}", "--output", "{model}"], "exists and is not empty"),
        (["--model-id", "{model}", "--output={output}"], "this machine has no Neuron device whose cores could be counted"),
        (["--model-id", "{model}", "--output", "{output}", "--device", "cpu"], "--device cpu: only models for Neuron"),
        (["--model-id", "{model}", "--output", "{output}", "--tp-degree", "3"], "tp_degree 3 is not possible with 3 cores"),
        (["--model-id", "{model}", "--output", "{output}", "--tp-degree", "2", "--quantize", "int4"], "give int8 or none"),
        (["--model-id", "{model}", "--output", "{output}", "--max-batch", "3"], "unknown argument '--max-batch'"),
        (["--model-id", "{compiled}", "--output", "{output}", "--tp-degree", "2"], "is compiled already"),
    ],
    ids=str,
)
def test_what_compile_cannot_do_is_one_line_and_exit_code_2(tmp_path, capsys, words, reason):
    places = {"model": checkpoint(tmp_path / "model"), "output": tmp_path / "output", "compiled": tmp_path / "compiled"}
    if "{compiled}" in words:
        compiled(tmp_path)
        capsys.readouterr()
    assert verb.main([word.format(**places) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not places["output"].exists()


def test_an_output_that_cannot_be_replaced_is_refused_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    for name in ("link", "empty"):
        words = ["--model-id", str(checkpoint(tmp_path / "model")), "--output", str(tmp_path / name), "--tp-degree", "1"]
        assert verb.main(words) == 2
        assert f"{name} is a symbolic link or a mount point; name a folder in it" in capsys.readouterr().err
    assert not fake.compiles


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_NEURON_FAIL", "compile")
    folder = checkpoint(tmp_path / "model")
    words = ["--model-id", str(folder), "--output", str(tmp_path / "deep" / "output"), "--tp-degree", "1"]
    assert verb.main(words) == 2
    assert "the compiler ran out of host memory" in capsys.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "deep").iterdir()) == []


def test_what_a_killed_compile_left_is_removed_by_the_next(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "model")
    words = ["--model-id", str(folder), "--output", str(tmp_path / "deep" / "output"), "--tp-degree", "1"]
    environment = os.environ | {"PYTHONPATH": FAKE, "FAKE_NEURON_COMPILE_S": "600"}
    process = subprocess.Popen([sys.executable, "-m", "models.compile", *words], cwd=HERE, env=environment)
    wait_until(lambda: list((tmp_path / "deep").glob(".neuron-textgen-*.new")), "the compile to start")
    process.kill()
    process.wait()
    assert verb.main(words) == 0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["output"]


@pytest.mark.parametrize("form", ["pytorch_model.bin", "split"])
def test_a_compiled_model_takes_along_weights_of_older_forms(tmp_path, form):
    folder = checkpoint(tmp_path / "model")
    weights = folder / "pytorch_model.bin" / "p0.weight" if form == "split" else folder / "pytorch_model.bin"
    weights.parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(weights)
    (folder / "other").mkdir()
    if form == "split":
        (weights.parent / "key_to_filename.json").write_text("{}")
    output = tmp_path / "compiled"
    assert verb.main(["--model-id", str(folder), "--output", str(output), "--tp-degree", "2"]) == 0
    assert (output / "checkpoint" / weights.relative_to(folder)).samefile(weights)
    assert not list(output.rglob("other"))


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


@pytest.mark.processes
def test_a_server_whose_device_samples_gives_concurrent_streams_their_own_texts(on_neuron, tmp_path):
    texts = ("a", "bc", "d" * 40, "e", "fgh")
    with on_neuron(SAMPLING="device", FAKE_NEURON_STEP_S="0.005") as server:
        server.wait_ready()
        info = json.loads(server.get("/info")[1])
        assert (info["model_device_type"], info["sampling"]) == ("neuron", "device")
        body = {"inputs": "zz", "parameters": {"temperature": 3.0, "top_k": 200, "max_new_tokens": 50}}
        noise = [server.request("POST", "/generate_stream", body) for _ in range(2)]
        streams = [server.request("POST", "/generate_stream", {"inputs": text}) for text in texts]
        for text, stream in zip(texts, streams):
            tokens = [event["token"] for event in events(stream)]
            prompt = byte_tokenizer(tmp_path).encode(text).ids
            expected = alone(prompt, 60)[len(prompt) :]
            expected = expected[: expected.index(LLAMA["eos_token_id"]) + 1] if LLAMA["eos_token_id"] in expected else expected
            assert [token["id"] for token in tokens] == expected
            assert {token["logprob"] for token in tokens} == {None}
        assert len({list(events(stream))[-1]["generated_text"] for stream in noise}) == 2
        for name, value in {"repetition_penalty": 1.1, "top_n_tokens": 2}.items():
            status, refused = server.generate("a", **{name: value})
            assert status == 422 and f"`{name}` " in refused["error"]
        assert server.generate("a", details=True, temperature=0.5)[1]["details"]["seed"] is None
        error = server.generate("a", do_sample=True, seed=1)[1]["error"]
        assert error.endswith("`seed` needs SAMPLING=host: this server samples on the device")
        server.wait_idle()
        assert server.stop() == 0
    assert not (tmp_path / "machine" / "violations.log").exists()
