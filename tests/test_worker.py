"""The worker's loop on a fake model: every request gets its own tokens and exactly one terminal message, whatever fails."""

import contextlib
import math
import subprocess
import sys
from unittest import mock

import pytest
from fakes.model import EOS, FakeModel, greedy
from hypothesis import given
from hypothesis import strategies as st
from loop import ENGINES, REUSES, Driven, on_every_engine

import worker
from config import Config
from engine.link import PeerLost
from engine.sampling import sampling
from models.errors import DeviceLost
from protocol import AdapterChange, Cancel, End, Generate, Hello, SamplingParams, Tokens
from run import HERE
from worker import log_scheduling

WAIT_S = 120  # for a process that takes two seconds on an idle machine
LONG = list(range(1, 31))  # a prompt of several chunks


def on_purpose(*_):
    raise RuntimeError("on purpose")


def prompt_of(*, tokens, most, ends_early=True):
    """A prompt that generates so many tokens, of at most `most`; the last one is an EOS token if it ends early."""
    texts = (([a, b], greedy([a, b], most)) for a in range(50) for b in range(50))
    return next(prompt for prompt, text in texts if len(text) == tokens and (text[-1] == EOS) == ends_early)


# Tokens and ends


@on_every_engine
def test_a_request_gets_its_tokens_and_one_terminal_message(engine):
    driven = Driven(**engine)
    driven.arrive(Generate(1, [5, 6, 7, 8, 9, 10], 4))
    driven.run()
    assert driven.tokens[1] == greedy([5, 6, 7, 8, 9, 10], 4)
    assert driven.ends == {1: "length"}


@pytest.mark.parametrize("most", [12, 3], ids=["before the limit", "as the last token"])
def test_an_eos_token_ends_a_request_and_is_sent(most):
    driven, prompt = Driven(), prompt_of(tokens=3, most=most)
    driven.arrive(Generate(1, prompt, most))
    driven.run()
    assert driven.tokens[1] == greedy(prompt, most)
    assert driven.ends == {1: "eos_token"}


def test_the_context_length_ends_a_request_for_more_tokens():
    driven = Driven(max_total_tokens=8)
    prompt = next([a, 1, 2, 3] for a in range(50) if EOS not in greedy([a, 1, 2, 3], 4))
    driven.arrive(Generate(1, prompt, 100))
    driven.run()
    assert driven.tokens[1] == greedy(prompt, 4)
    assert driven.ends == {1: "length"}


def test_no_eos_token_comes_before_min_new_tokens():
    driven, prompt = Driven(), prompt_of(tokens=3, most=8)
    driven.arrive(Generate(1, prompt, 8, min_new_tokens=5))
    driven.run()
    assert EOS not in driven.tokens[1][:5] and len(driven.tokens[1]) >= 5
    assert driven.tokens[1][:2] == greedy(prompt, 2)


def test_an_eos_token_that_is_ignored_does_not_end_a_request():
    driven = Driven()
    driven.arrive(Generate(1, prompt_of(tokens=3, most=8), 8, ignore_eos=True))
    driven.run()
    assert driven.tokens[1][2] == EOS and len(driven.tokens[1]) == 8
    assert driven.ends == {1: "length"}


@on_every_engine
def test_requests_join_while_others_run_and_change_none_of_their_tokens(engine):
    driven = Driven(**engine)
    driven.arrive(Generate(1, [1, 2], 10))
    driven.step(2)
    driven.arrive(Generate(2, [3], 10))
    driven.step()
    driven.arrive(Generate(3, [4, 5, 6, 7, 8, 9], 10))
    driven.run()
    assert [driven.tokens[i] for i in (1, 2, 3)] == [greedy(p, 10) for p in ([1, 2], [3], [4, 5, 6, 7, 8, 9])]


@on_every_engine
def test_sampled_tokens_do_not_depend_on_other_requests(engine):
    seeded = Generate(1, [9] * 6, 12, sampling=SamplingParams(seed=11, temperature=1.3, top_k=20))
    alone, crowded = Driven(), Driven(**engine)
    alone.arrive(seeded)
    alone.run()
    crowded.arrive(*(Generate(i, [i], 30, sampling=SamplingParams(seed=i)) for i in (2, 3)))
    crowded.step(2)
    crowded.arrive(seeded)
    crowded.run()
    assert alone.tokens[1] == crowded.tokens[1] != greedy([9] * 6, 12)


@pytest.mark.parametrize("engine", ["supports_chunked_prefill", "chunks"])
def test_a_short_prompt_has_its_first_token_while_a_long_one_is_in_progress_and_others_generate(engine):
    driven = Driven(max_batch_prefill_tokens=4, **ENGINES[engine])
    driven.arrive(Generate(1, [1], 30, ignore_eos=True))
    driven.step()
    driven.arrive(Generate(2, LONG, 3), Generate(3, [7, 8, 9], 5))
    while 2 not in driven.prompts:
        driven.step()
    assert list(driven.prompts) == [1, 3, 2]
    assert len(driven.tokens[1]) >= len(LONG) / 4
    driven.run()
    for i, prompt, most in (2, LONG, 3), (3, [7, 8, 9], 5):
        assert driven.tokens[i] == greedy(prompt, most)


@pytest.mark.parametrize("engine", REUSES.values(), ids=REUSES)
def test_what_a_slot_still_holds_of_a_prompt_does_not_run_again_and_the_text_is_the_same(engine):
    driven = Driven(batch_size=2, max_total_tokens=200, **engine)
    driven.arrive(Generate(1, [3, 4, 5], 190, ignore_eos=True))
    prompt, cached = list(range(1, 14)), []
    for turn in range(2, 6):
        driven.arrive(Generate(turn, prompt, 6))
        while turn not in driven.ends:
            driven.step()
        assert driven.tokens[turn] == greedy(prompt, 6)
        cached.append(driven.prompts[turn].cached)
        prompt = [*prompt, *driven.tokens[turn], 20 + turn, 21, 22, 23, 24]
    assert cached[0] == 0 and all(held >= 4 for held in cached[1:])


def test_a_prefix_of_a_running_request_is_copied():
    driven = Driven(batch_size=3, supports_chunked_prefill=True, prefix_granularity=1, supports_prefix_copy=True)
    prompt = list(range(1, 20))
    driven.arrive(Generate(1, prompt, 15, ignore_eos=True))
    driven.step()
    driven.arrive(Generate(2, [*prompt, 30], 5), Generate(3, [*prompt[:9], 31, 32], 5))
    driven.run()
    assert [driven.prompts[i].cached for i in (1, 2, 3)] == [0, 18, 9]
    for i, tail in (2, [30]), (3, [31, 32]):
        assert driven.tokens[i] == greedy([*prompt[: {2: 19, 3: 9}[i]], *tail], 5)


def test_requests_get_slots_in_the_order_of_arrival():
    driven = Driven(batch_size=2)
    driven.arrive(*(Generate(i, [10 + i], 3) for i in range(4)))
    driven.run()
    assert list(driven.prompts) == [0, 1, 2, 3]


def test_connected_is_logged_once_every_web_process_is_ready(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("worker.run_dir", lambda: tmp_path)
    caplog.set_level("INFO")
    driven = Driven(web_concurrency=2)
    driven.arrive(Hello(False), Hello(True))
    driven.arrive(Hello(False), peer=b"other")
    driven.step()
    assert not (tmp_path / "ready").exists()
    driven.arrive(Hello(True), peer=b"other")
    driven.step()
    assert (tmp_path / "ready").exists()
    assert caplog.messages.count("Connected") == 1
    assert driven.worker.load()["ready"] == 1
    driven.worker.drain()
    assert driven.worker.load()["ready"] == 0


def test_behind_connected_stands_the_address(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("worker.run_dir", lambda: tmp_path)
    caplog.set_level("INFO")
    driven = Driven(web_concurrency=1, port=8081)
    driven.arrive(Hello(True))
    driven.step()
    assert caplog.messages[-2:] == ["Connected", "Listening on http://localhost:8081/ (API and web UI)"]


# Failures


@pytest.mark.parametrize(("engine", "failed"), [("supports_chunked_prefill", {1, 2}), ("chunks", {2}), ("whole", {2})])
def test_a_failed_step_ends_the_requests_of_that_step_and_no_others(engine, failed):
    driven = Driven(batch_size=2, max_batch_prefill_tokens=4, **ENGINES[engine])
    driven.arrive(Generate(1, [1, 2], 8, ignore_eos=True))
    driven.step(2)
    driven.arrive(Generate(2, LONG, 8), Generate(3, [6], 8))
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.run()
    assert {i for i, end in driven.ends.items() if end == "failed"} == failed
    for i, prompt in {1: [1, 2], 3: [6]}.items():
        assert i in failed or driven.tokens[i] == greedy(prompt, 8)


def test_a_failed_decode_step_ends_what_runs_after_its_last_token_and_the_loop_goes_on():
    driven = Driven(batch_size=2)
    driven.arrive(*(Generate(i, [i], 8, ignore_eos=True) for i in (1, 2, 3)))
    driven.step(2)
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.step()
    assert [type(message) for _peer, message in driven.wire.sent] == [Tokens, Tokens, End, End]
    driven.run()
    assert driven.ends == {1: "failed", 2: "failed", 3: "length"}


def test_a_lost_device_ends_the_requests_of_the_step_and_then_the_loop():
    driven = Driven()
    driven.arrive(Generate(1, [1, 2], 8))
    driven.model.failures.append(DeviceLost("the core does not answer"))
    with pytest.raises(DeviceLost):
        driven.worker.run()
    assert driven.ends == {1: "failed"}


@pytest.mark.parametrize("what", ["sample", "logprobs"])
def test_when_no_row_can_be_sampled_or_scored_what_runs_ends_and_the_loop_goes_on(what, monkeypatch):
    driven = Driven(batch_size=2)
    driven.arrive(*(Generate(i, [i], 8, ignore_eos=True) for i in (1, 2, 3)))
    driven.step(3)
    monkeypatch.setattr(sampling, what, on_purpose)
    driven.step()
    monkeypatch.undo()
    driven.run()
    assert driven.ends == {1: "failed", 2: "failed", 3: "length"}


# Progress, draining and stopping


def test_the_running_step_has_a_limit_of_time_and_there_is_none_when_there_is_nothing_to_do():
    driven, limits_s = Driven(), []
    driven.each_call(lambda _chunks: limits_s.append(driven.wire.limit_s))
    driven.arrive(Generate(1, [1, 2], 3))
    driven.step()
    assert limits_s[0] > 50
    driven.run()
    driven.wire.interrupt()
    driven.worker.receive()
    assert (driven.wire.limit_s, driven.wire.phase) == (math.inf, "ready")


def test_stopping_ends_every_open_request():
    driven = Driven(batch_size=1)
    driven.arrive(Generate(1, [1, 2], 30), Generate(2, [3], 30))
    driven.step()
    driven.worker.stop()
    driven.arrive(Generate(3, [4], 6))
    driven.worker.run()
    assert driven.ends == dict.fromkeys((1, 2, 3), "draining")
    assert driven.is_idle


def test_draining_finishes_what_is_known_and_refuses_what_is_new():
    driven = Driven(batch_size=1)
    driven.arrive(Generate(1, [1, 2], 6), Generate(2, [3], 6))
    driven.step()
    driven.worker.drain()
    driven.arrive(Generate(3, [4], 6))
    driven.worker.run()
    assert driven.ends[3] == "draining"
    assert [driven.tokens[1], driven.tokens[2]] == [greedy([1, 2], 6), greedy([3], 6)]
    assert driven.wire.phase == "draining"


# Everything at once

arrivals = st.tuples(
    st.integers(0, 12),  # the turn in which it arrives
    st.lists(st.integers(1, 49), min_size=1, max_size=12),
    st.integers(1, 40),
    st.booleans(),  # log-probabilities of the prompt
    st.sampled_from([b"a", b"b"]),
    st.one_of(st.none(), st.integers(0, 20)),  # the turn in which it is cancelled
)
TROUBLES = ("the step fails", "a row is not a number", "nothing can be published", "a is gone")


@given(
    st.sampled_from(list(ENGINES)),
    st.lists(arrivals, max_size=10),
    st.dictionaries(st.integers(0, 25), st.sampled_from(TROUBLES), max_size=3),
    st.integers(0, 1),
)
def test_whatever_happens_every_request_gets_one_terminal_message_and_nothing_leaks(engine, schedule, troubles, lag):
    driven = Driven(max_concurrent_requests=6, max_total_tokens=24, max_batch_prefill_tokens=4, **ENGINES[engine])
    driven.output_thread.lag = lag
    for turn in range(30):
        for i, (arrives, prompt, most, scored, peer, cancelled) in enumerate(schedule):
            if arrives == turn:
                driven.arrive(Generate(i, prompt, most, prompt_logprobs=scored), peer=peer)
            if cancelled == turn:
                driven.arrive(Cancel(i, "test"), peer=peer)
        trouble = troubles.get(turn)
        driven.model.failures = [RuntimeError("on purpose")] if trouble == TROUBLES[0] else []
        driven.model.nan_slots = {0} if trouble == TROUBLES[1] else set()
        if trouble == TROUBLES[3]:
            driven.arrive(PeerLost(), peer=b"a")
        driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
        failing = mock.patch.object(sampling, "logprobs", side_effect=RuntimeError("on purpose"))
        with failing if trouble == TROUBLES[2] else contextlib.nullcontext():
            driven.step()
    driven.model.failures, driven.model.nan_slots = [], set()
    driven.run()
    assert set(driven.ends) == set(range(len(schedule)))
    assert set(driven.tokens) <= set(driven.prompts)
    for i, (_arrives, prompt, most, scored, _peer, _cancelled) in enumerate(schedule):
        expected = greedy(prompt, min(most, 24 - len(prompt)))
        assert driven.tokens[i] == expected[: len(driven.tokens[i])]
        if driven.ends[i] in ("length", "eos_token"):
            assert driven.tokens[i] == expected
            assert len(driven.prompts[i].scores) == (len(prompt) - 1 if scored else 0)


@given(
    st.sampled_from(list(REUSES)),
    st.lists(st.tuples(arrivals, st.integers(0, 3), st.integers(0, 2)), min_size=3, max_size=12),
    st.sampled_from([0, 4]),
)
def test_each_request_generates_with_its_own_adapter_in_any_schedule(engine, schedule, verify_length):
    """Prompts of three texts, so that many begin as what a slot holds, of the same adapter or of another one."""
    adapters = ["a", "b", "c"]
    texts = [list(range(1, 20)), [*range(1, 9), 30, 31, 32], [7, 8] * 6]
    driven = Driven(
        batch_size=3, max_total_tokens=40, adapters=adapters, verify_length=verify_length, prefix_slots=5, **REUSES[engine]
    )
    expected = {}
    for turn in range(24):
        for i, ((arrives, own, most, scored, peer, cancelled), adapter, text) in enumerate(schedule):
            if arrives == turn:
                prompt = [*texts[text], *own[:3]]
                expected[i] = greedy(prompt, min(most, 40 - len(prompt)), adapter=adapter)
                name = adapters[adapter - 1] if adapter else ""
                driven.arrive(Generate(i, prompt, most, prompt_logprobs=scored, adapter=name), peer=peer)
            if cancelled == turn:
                driven.arrive(Cancel(i, "test"), peer=peer)
        driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
        driven.step()
    driven.run()
    for i, tokens in expected.items():
        assert driven.tokens[i] == tokens[: len(driven.tokens[i])]
        assert driven.ends[i] == "cancelled" or driven.tokens[i] == tokens


def test_gateways_learn_which_adapters_run_and_which_wait():
    driven = Driven(batch_size=2, adapters=["a", "b", "c"])
    driven.arrive(*(Generate(i, [5, 6], 30, adapter=name, ignore_eos=True) for i, name in enumerate(["a", "", "c", "b", "b"])))
    driven.step(3)
    (line,) = [
        line for line in driven.worker.metrics.render().decode().splitlines() if line.startswith("vllm:lora_requests_info{")
    ]
    assert 'max_lora="2",running_lora_adapters="a",waiting_lora_adapters="b,c"' in line
    driven.run()
    (line,) = [
        line for line in driven.worker.metrics.render().decode().splitlines() if line.startswith("vllm:lora_requests_info{")
    ]
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in line
    assert b"vllm:lora" not in Driven().worker.metrics.render()


# The process

PROCESS = """
import errno, sys, threading, worker
from run import ConfigError
from models.errors import DeviceLost, ModelError

def run(boot):
    if sys.argv[1] == "socket":
        boot.link.send(b"", object())  # cannot be encoded
        threading.Event().wait()
    if sys.argv[1] == "thread":
        aside = threading.Thread(target=lambda: 1 / 0, name="aside")
        aside.start()
        aside.join()
        raise ConfigError("the boot went on")
    if sys.argv[1] == "disk":
        raise OSError(errno.ENOSPC, "on purpose", "/a/file")
    if sys.argv[1] == "memory":
        raise MemoryError
    errors = {"device": DeviceLost, "model": ModelError, "configuration": ConfigError, "bug": KeyError}
    raise errors[sys.argv[1]]("on purpose")

worker.Startup.run = run
sys.exit(worker.main())
"""


def ended_by(failure, folder, monkeypatch):
    (folder / "config.json").write_text(Config().to_json())
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(folder))
    command = [sys.executable, "-c", PROCESS, failure]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("socket", 1, "CRITICAL worker: the thread worker-socket failed: TypeError"),
        ("disk", 1, "ERROR worker: /a/file: No space left on device; free space, or name another folder with TMPDIR"),
        ("memory", 1, "ERROR worker: Cannot allocate memory; use a machine or container with more memory"),
        ("device", 1, "ERROR worker: unrecoverable device error; restart the process: on purpose"),
        ("model", 2, "ERROR worker: on purpose"),
        ("configuration", 2, "ERROR worker: on purpose"),
        ("bug", 1, "CRITICAL worker: the worker failed: KeyError('on purpose')"),
    ],
)
def test_a_worker_that_cannot_go_on_ends_with_one_message_and_its_exit_code(failure, code, message, tmp_path, monkeypatch):
    ended = ended_by(failure, tmp_path, monkeypatch)
    assert ended.returncode == code, ended.stderr
    assert [line for line in ended.stderr.splitlines() if message in line]
    assert sum("CRITICAL" in line or "ERROR" in line for line in ended.stderr.splitlines()) == 1


@pytest.mark.processes
def test_an_error_in_a_thread_of_a_library_is_logged_and_the_worker_goes_on(tmp_path, monkeypatch):
    ended = ended_by("thread", tmp_path, monkeypatch)
    assert ended.returncode == 2, ended.stderr
    assert "ERROR worker: the thread aside failed: ZeroDivisionError" in ended.stderr
    assert "ERROR worker: the boot went on" in ended.stderr


FAILED_LOAD = """
import config, sys, threading, worker
from models.errors import ModelError

begun = threading.Barrier(3)

def run_for_ever(*_):
    begun.wait()
    threading.Event().wait()

class Prepared:
    folder = config.DEMO_MODEL
    device = "cpu"
    logits_dtypes = ["float32"]

    def __init__(self, config):
        self.config = config

def load(prepared, announce):
    begun.wait()  # both run beside it
    raise ModelError("on purpose")

worker.models.prepare = Prepared
worker.models.load = load
worker.sampling.compile_loops = worker.check_tokenizer = run_for_ever
sys.exit(worker.main())
"""


@pytest.mark.processes
def test_a_failed_load_ends_the_start_at_once_whatever_runs_beside_it(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(Config(max_input_tokens=1, max_total_tokens=2).to_json())
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(tmp_path))
    command = [sys.executable, "-c", FAILED_LOAD]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr.splitlines()[-1][25:]) == (2, "ERROR worker: on purpose")


MIXES, CHUNKS, WHOLE = {"supports_chunked_prefill": True}, {"prefill_chunk": 64}, {}


@pytest.mark.parametrize(
    ("engine", "most", "default"),
    [
        (MIXES, 512, "as many as take 150 ms, at most 512"),
        (CHUNKS, 64, "64"),
        (WHOLE, 128, "128"),
    ],
    ids=["mixed steps", "chunks", "whole prompts"],
)
def test_a_prefill_budget_above_every_default_is_advised_against(engine, most, default, caplog):
    model = FakeModel(**engine)
    for fine in (None, 1, most):
        log_scheduling(Config(max_batch_prefill_tokens=fine), model)
    assert not caplog.records
    log_scheduling(Config(max_batch_prefill_tokens=4096), model)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("--max-batch-prefill-tokens 4096 (MAX_BATCH_PREFILL_TOKENS): running requests")
    assert f"leave it unset ({default}) unless" in record.getMessage()


def test_eos_ids_that_the_model_does_not_have_are_ignored_with_one_warning(caplog):
    assert worker.known_eos_ids([2, 10**30, -1, 2, 99, 100], 100) == [2, 99]
    (record,) = caplog.records
    assert "(0 to 99): 1000000000" in record.getMessage()
    assert record.getMessage().endswith(", -1, 100")
    caplog.clear()
    assert worker.known_eos_ids([0, 99], 100) == [0, 99]
    assert not caplog.records


def test_what_an_api_server_process_asks_in_a_wrong_way_ends_that_message_alone(caplog):
    driven = Driven(batch_size=2, max_total_tokens=60)
    driven.arrive(Generate(1, [5, 6], 40, ignore_eos=True))
    driven.step(3)
    driven.arrive(Generate(2, [5, 6], 4, adapter="none is served"))
    driven.arrive(AdapterChange(3, "a", "/a"))  # adapters stay as they are
    driven.run()
    assert driven.tokens[1][:3] == greedy([5, 6], 40) and len(driven.tokens[1]) == 40
    assert driven.ends[2] == "unknown_adapter"
    assert driven.admission.count == 0
    assert "a message from an API server process cannot" in caplog.text
