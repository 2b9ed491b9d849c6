"""Adapters are loaded and unloaded between steps, while requests run: none is lost, and each keeps its own adapter."""

import random
import threading
import time

import pytest
from fakes.model import ADAPTER, greedy
from loop import Driven

from models.adapters import COLUMNS, Adapters
from protocol import AdapterChange, AdapterChanged, Generate


def driven(**options):
    options = {"read_adapter": lambda _name, _source: ADAPTER, "adapters": ["a"], "max_total_tokens": 60} | options
    return Driven(batch_size=3, **options)


def answers(driven):
    return {message.id: message.error for _peer, message in driven.wire.sent if isinstance(message, AdapterChanged)}


def step_until(driven, holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        driven.wire.interrupt()
        driven.step()


def test_an_adapter_is_read_while_steps_run_and_is_there_when_the_answer_comes():
    may_read = threading.Event()

    def read(_name, _source):
        assert may_read.wait(60)
        return ADAPTER

    worker = driven(read_adapter=read)
    worker.arrive(Generate(1, [5, 6], 40, ignore_eos=True), AdapterChange(7, "b", "/b"))
    worker.step(5)
    assert len(worker.tokens[1]) >= 4 and answers(worker) == {} and list(worker.model.adapters.numbers) == ["a"]
    may_read.set()
    step_until(worker, lambda: 7 in answers(worker))
    assert answers(worker) == {7: ""} and worker.wire.info.adapters == {"a": "/a", "b": "/b"}
    worker.arrive(Generate(2, [5, 6], 6, adapter="b"))
    worker.run()
    assert worker.tokens[2] == greedy([5, 6], 6, adapter=2)


def test_unloading_waits_for_the_requests_that_run_and_new_ones_do_not_know_the_adapter():
    worker = driven()
    worker.arrive(Generate(1, [5, 6], 12, adapter="a", ignore_eos=True))
    worker.step(3)
    worker.arrive(AdapterChange(7, "a"), Generate(2, [5, 6], 6, adapter="a"))
    worker.step()
    assert answers(worker) == {} and worker.wire.info.adapters == {}
    assert worker.ends == {2: "unknown_adapter"}
    worker.run()
    step_until(worker, lambda: 7 in answers(worker))
    assert worker.ends[1] == "length" and worker.tokens[1][:2] == greedy([5, 6], 2, adapter=1)
    assert answers(worker) == {7: ""} and worker.model.adapters.nbytes == 0


def test_an_adapter_takes_the_place_of_one_of_its_name_for_new_requests_and_those_that_run_keep_theirs():
    worker = driven(max_total_tokens=3000)
    worker.arrive(Generate(1, [5, 6], 2900, adapter="a", ignore_eos=True))
    worker.step(3)
    worker.arrive(AdapterChange(7, "a", "/newer", in_place=True))
    step_until(worker, lambda: worker.model.adapters.numbers == {"a": 2})
    assert worker.wire.info.adapters == {"a": "/newer"} and answers(worker) == {} and worker.ends == {}
    worker.arrive(Generate(2, [5, 6], 6, adapter="a"))
    worker.run(at_most=3000)
    step_until(worker, lambda: 7 in answers(worker))
    assert answers(worker) == {7: ""} and worker.model.adapters.columns_of([2]) == (0, COLUMNS)
    alone = driven(max_total_tokens=3000)
    alone.arrive(Generate(1, [5, 6], 2900, adapter="a", ignore_eos=True))
    alone.run(at_most=3000)
    assert worker.tokens == {1: alone.tokens[1], 2: greedy([5, 6], 6, adapter=2)}


def test_a_name_that_is_served_or_being_loaded_is_refused_and_so_is_one_that_is_not_known():
    worker = driven()
    changes = {1: ("a", "/x"), 3: ("b", "/x"), 4: ("b", "/y", True), 5: ("c", ""), 6: ("b", "")}
    worker.arrive(*(AdapterChange(number, *change) for number, change in changes.items()))
    step_until(worker, lambda: len(answers(worker)) == 5)
    found = answers(worker)
    assert found[1].startswith("a is served already: unload it, or ") and found[3] == ""
    assert found[4] == found[6] == "b is being loaded" and found[5] == "the LoRA adapter c is not loaded"
    assert worker.wire.info.adapters == {"a": "/a", "b": "/x"}


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), OSError("on purpose")])
def test_a_failed_load_changes_nothing(error):
    def fail(_name, _source):
        raise error

    worker = driven(read_adapter=fail)
    worker.arrive(AdapterChange(1, "b", "/b"), AdapterChange(2, "a", "/newer", in_place=True))
    worker.step()
    step_until(worker, lambda: len(answers(worker)) == 2)
    assert answers(worker) == dict.fromkeys((1, 2), f"{type(error).__name__}: on purpose")
    assert worker.model.adapters.numbers == {"a": 1} and worker.wire.info.adapters == {"a": "/a"}
    assert all(message.is_of_machine for _peer, message in worker.wire.sent)


def test_a_slow_load_keeps_no_other_waiting_and_so_many_adapters_are_served():
    may_read = threading.Event()

    def read(name, _source):
        assert name != "slow" or may_read.wait(60)
        return ADAPTER

    worker = driven(read_adapter=read, settings={"max_cpu_loras": 3})
    worker.arrive(AdapterChange(1, "slow", "/b"), AdapterChange(2, "quick", "/b"), AdapterChange(3, "fourth", "/b"))
    step_until(worker, lambda: 2 in answers(worker))
    worker.arrive(AdapterChange(4, "slow", "/b"))
    step_until(worker, lambda: 4 in answers(worker))
    limit = "--max-cpu-loras (MAX_CPU_LORAS) is 3, and as many adapters are served or being loaded"
    assert answers(worker) == {2: "", 3: limit, 4: "slow is being loaded"}
    may_read.set()
    step_until(worker, lambda: 1 in answers(worker))
    assert list(worker.model.adapters.numbers) == ["a", "quick", "slow"]


def test_what_does_not_fit_into_the_memory_for_adapters_is_refused_by_the_setting():
    worker = driven(settings={"max_lora_memory": 2 * COLUMNS * 2 * 4 / 1e9})
    worker.arrive(AdapterChange(1, "b", "/b"), AdapterChange(2, "c", "/b"))
    step_until(worker, lambda: len(answers(worker)) == 2)
    assert sorted(map(bool, answers(worker).values())) == [False, True]
    (refused,) = filter(None, answers(worker).values())
    assert refused == "all LoRA adapters would take 0.00 GB; --max-lora-memory (MAX_LORA_MEMORY) says how much they may take"


def test_copies_are_made_while_steps_run(monkeypatch):
    may_copy = threading.Event()
    add = Adapters.add
    monkeypatch.setattr(Adapters, "add", lambda *arguments: add(*arguments) if may_copy.wait(60) else None)
    may_copy.set()
    worker = driven()
    may_copy.clear()
    worker.arrive(Generate(1, [5, 6], 40, ignore_eos=True), AdapterChange(7, "b", "/b"))
    worker.step(20)
    assert len(worker.tokens[1]) >= 19 and answers(worker) == {}
    may_copy.set()
    step_until(worker, lambda: 7 in answers(worker))
    assert answers(worker) == {7: ""}


def test_fifty_loads_and_unloads_lose_no_request_and_mix_up_no_adapter():
    worker = driven(supports_chunked_prefill=True, prefix_granularity=1, supports_prefix_copy=True)
    chance = random.Random(0)
    expected = {}
    for turn in range(50):
        worker.arrive(AdapterChange(1000 + turn, "b", "/b"))
        step_until(worker, lambda turn=turn: 1000 + turn in answers(worker))
        number = worker.model.adapters.numbers["b"]
        for name, adapter in (("a", 1), ("b", number), ("", 0)):
            request_id = len(expected) + 1
            prompt = [1, 2, 3, 4, 5, 6, 7, chance.randrange(3)]
            expected[request_id] = greedy(prompt, 5, adapter=adapter)
            worker.arrive(Generate(request_id, prompt, 5, adapter=name))
        worker.step(chance.randrange(4))
        worker.arrive(AdapterChange(2000 + turn, "b"))
        step_until(worker, lambda turn=turn: 2000 + turn in answers(worker))
    worker.run()
    assert {request_id: worker.tokens[request_id] for request_id in expected} == expected
    assert set(worker.ends.values()) <= {"length", "eos_token"} and set(answers(worker).values()) == {""}
