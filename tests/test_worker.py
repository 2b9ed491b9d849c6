"""The worker's loop on a fake model: who gets which slot, who gets which tokens, and that everybody gets one end."""

from collections import Counter, defaultdict

import pytest
from fakes.model import EOS, FakeModel, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

import worker as worker_module
from protocol import Cancel, End, Generate, Gone, Hello, Sampling, Token, Tokens
from worker import Worker


class Wire:
    """Stands where the socket is: what arrives is put in by the test, what is sent is kept."""

    def __init__(self):
        self.arrivals = []
        self.sent = []
        self.status = None

    def receive(self, block):
        assert self.arrivals or not block, "the worker would wait for ever"
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def send(self, peer, message):
        self.sent.append((peer, message))

    def report(self, status):
        self.status = status

    def interrupt(self):
        pass


class Bench:
    """A worker on a fake model, driven turn by turn."""

    def __init__(self, max_concurrent_requests=100, **model):
        self.wire = Wire()
        self.model = FakeModel(**model)
        self.worker = Worker(self.model, self.wire, frozenset([EOS]), max_concurrent_requests)

    def arrive(self, message, peer=b"web"):
        self.wire.arrivals.append((peer, message))

    def turn(self):
        self.worker.receive()
        self.worker.admit()
        self.worker.send()
        self.worker.decode()
        self.worker.send()

    def run(self, most=500):
        """Turns until nothing is known any more."""
        for _ in range(most):
            if self.wire.arrivals:
                self.worker.receive()
            if not self.worker._known:
                break
            self.worker.admit()
            self.worker.send()
            self.worker.decode()
            self.worker.send()
        assert not self.worker._known, "requests are left over"
        self.assert_idle()

    def assert_idle(self):
        assert self.worker.slots.busy == 0
        assert not self.worker.queue
        assert not self.worker._gained
        assert (self.wire.status.running, self.wire.status.queued) == (0, 0)

    @property
    def tokens(self):
        """Request id → the token ids that were sent for it."""
        tokens = defaultdict(list)
        for _peer, message in self.wire.sent:
            for token in getattr(message, "tokens", []):
                tokens[token.id].append(token.token)
        return tokens

    @property
    def ends(self):
        """Request id → how it ended; fails when something comes after an end."""
        ends = {}
        for _peer, message in self.wire.sent:
            for word in message.tokens if isinstance(message, Tokens) else [message]:
                assert word.id not in ends, "a word after the last one"
                if isinstance(word, End):
                    ends[word.id] = word.reason
                elif word.finish_reason:
                    ends[word.id] = word.finish_reason
        return ends


def test_a_request_gets_its_tokens_and_one_end():
    bench = Bench()
    bench.arrive(Generate(1, [5, 6, 7], 4))
    bench.run()
    assert bench.tokens[1] == greedy([5, 6, 7], 4)
    assert bench.ends == {1: "length"}


def test_an_eos_token_ends_a_request_and_is_delivered():
    prompt = next([a, b] for a in range(50) for b in range(50) if greedy([a, b], 12)[-1] == EOS and len(greedy([a, b], 12)) > 2)
    bench = Bench()
    bench.arrive(Generate(1, prompt, 12))
    bench.run()
    assert bench.tokens[1] == greedy(prompt, 12)
    assert bench.ends == {1: "eos_token"}


def test_eos_as_the_last_allowed_token_is_an_eos():
    prompt = next([a, b] for a in range(50) for b in range(50) if greedy([a, b], 3)[-1] == EOS and len(greedy([a, b], 3)) == 3)
    bench = Bench()
    bench.arrive(Generate(1, prompt, 3))
    bench.run()
    assert bench.ends == {1: "eos_token"}


def test_the_window_ends_a_request_that_asks_for_more():
    bench = Bench(max_total_tokens=8)
    prompt = next([a, 1, 2, 3] for a in range(50) if EOS not in greedy([a, 1, 2, 3], 4))
    bench.arrive(Generate(1, prompt, 100))
    bench.run()
    assert bench.tokens[1] == greedy(prompt, 4)
    assert bench.ends == {1: "length"}


def test_a_newcomer_joins_while_others_run_and_disturbs_nobody():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 10))
    bench.turn()
    bench.turn()
    bench.arrive(Generate(2, [3], 10))
    bench.turn()
    bench.arrive(Generate(3, [4, 5, 6, 7], 10))
    bench.run()
    assert [bench.tokens[i] for i in (1, 2, 3)] == [greedy(p, 10) for p in ([1, 2], [3], [4, 5, 6, 7])]


def test_first_come_first_served_and_the_lowest_free_slot_first():
    bench = Bench(batch_size=2)
    for i in range(4):
        bench.arrive(Generate(i, [10 + i], 3))
    bench.turn()
    assert [r.generate.id for r in bench.worker.slots.requests if r] == [0]
    bench.turn()
    assert [r.generate.id for r in bench.worker.queue] == [2, 3]
    bench.run()
    assert list(bench.ends) == sorted(bench.ends)


def test_every_step_names_every_live_slot():
    bench = Bench()
    for i in range(3):
        bench.arrive(Generate(i, [20 + i, 1], 6 + i))
    bench.turn()
    bench.turn()
    bench.turn()
    live = [slot for slot, _request in bench.worker.slots.live()]
    bench.worker.decode()
    assert bench.model.decoded_slots[-1] == live


def test_one_message_a_step_for_each_web_process():
    bench = Bench(batch_size=4)
    for i, peer in enumerate([b"a", b"b", b"a", b"b"]):
        bench.arrive(Generate(i, [30, i], 30), peer)
    for _ in range(4):
        bench.turn()
    live_peers = {request.peer for _slot, request in bench.worker.slots.live()}
    assert live_peers == {b"a", b"b"}
    bench.wire.sent.clear()
    bench.turn()
    assert Counter(peer for peer, _message in bench.wire.sent) == dict.fromkeys(live_peers, 1)


def test_a_first_token_does_not_wait_for_the_step_of_the_others():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.worker.receive()
    bench.worker.admit()
    bench.worker.send()
    assert bench.tokens[1] == greedy([1, 2], 1)


def test_the_limit_of_concurrent_requests_is_exact():
    bench = Bench(max_concurrent_requests=3)
    for i in range(5):
        bench.arrive(Generate(i, [i + 1], 2))
    bench.run()
    assert [i for i, reason in bench.ends.items() if reason == "overloaded"] == [3, 4]


@pytest.mark.parametrize("turns", [0, 1, 3], ids=["waiting", "just prefilled", "decoding"])
def test_a_cancelled_request_frees_its_place_at_once(turns):
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 30))
    if turns == 0:
        bench.arrive(Generate(2, [3], 30))
        bench.turn()
        bench.arrive(Cancel(2, "client hung up"))
    else:
        for _ in range(turns):
            bench.turn()
        bench.arrive(Cancel(1, "client hung up"))
    bench.worker.receive()
    assert bench.worker.slots.busy == (1 if turns == 0 else 0)
    assert not bench.worker.queue
    assert list(bench.ends.values()) == ["cancelled"]


def test_cancelling_twice_or_what_is_unknown_is_no_error_and_no_answer():
    bench = Bench()
    bench.arrive(Cancel(99, "never was"))
    bench.arrive(Generate(1, [1], 5))
    bench.arrive(Cancel(1, "first"))
    bench.arrive(Cancel(1, "second"))
    bench.turn()
    assert bench.ends == {1: "cancelled"}
    bench.assert_idle()


def test_requests_of_a_web_process_that_is_gone_end_and_the_others_do_not_notice():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8), b"gone")
    bench.arrive(Generate(2, [3, 4], 8), b"here")
    bench.turn()
    bench.turn()
    bench.arrive(Gone(), b"gone")
    bench.run()
    assert bench.ends[1] == "cancelled"
    assert bench.tokens[2] == greedy([3, 4], 8)


def test_a_failed_prefill_ends_that_request_alone():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.turn()
    bench.model.fail_next_prefill = True
    bench.arrive(Generate(2, [3], 8))
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_a_row_that_is_not_a_number_ends_that_request_alone():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8))
    bench.turn()
    bench.turn()
    bench.model.nan_slots = {1}
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_an_exception_in_one_sampler_ends_that_request_alone(monkeypatch):
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8, Sampling(seed=7)))
    bench.turn()
    bench.turn()
    broken = bench.worker._known[2].sampler
    monkeypatch.setattr(broken, "choose", lambda logits: 1 // 0)
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_a_failed_step_ends_what_runs_and_the_loop_goes_on():
    bench = Bench(batch_size=2)
    for i in (1, 2, 3):
        bench.arrive(Generate(i, [i], 8))
    bench.turn()
    bench.turn()
    bench.model.fail_next_decode = True
    bench.run()
    assert [bench.ends[1], bench.ends[2]] == ["failed", "failed"]
    assert bench.tokens[3] == greedy([3], 8)


def test_what_a_request_gained_goes_out_before_the_word_that_ends_it():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 8))
    bench.worker.receive()
    bench.worker.admit()
    bench.model.fail_next_decode = True
    bench.worker.decode()
    bench.worker.send()
    kinds = [type(message) for _peer, message in bench.wire.sent]
    assert kinds == [Tokens, End]


def test_stopping_ends_every_open_request():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 30))
    bench.arrive(Generate(2, [3], 30))
    bench.turn()
    bench.worker.stop()
    bench.worker.run()
    assert set(bench.ends) == {1, 2}
    assert bench.worker.slots.busy == 0


def test_draining_finishes_what_is_known_and_refuses_what_is_new():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 6))
    bench.arrive(Generate(2, [3], 6))
    bench.turn()
    bench.worker.drain()
    bench.arrive(Generate(3, [4], 6))
    bench.worker.run()
    assert bench.ends[3] == "draining"
    assert [bench.tokens[1], bench.tokens[2]] == [greedy([1, 2], 6), greedy([3], 6)]
    assert bench.wire.status.phase == "draining"


def test_sampled_tokens_do_not_depend_on_the_company():
    sampling = Sampling(seed=11, temperature=1.3, top_k=20)
    alone, crowded = Bench(), Bench()
    alone.arrive(Generate(1, [9, 9], 12, sampling))
    alone.run()
    for i in (2, 3):
        crowded.arrive(Generate(i, [i], 30, Sampling(seed=i)))
    crowded.turn()
    crowded.turn()
    crowded.arrive(Generate(1, [9, 9], 12, sampling))
    crowded.run()
    assert alone.tokens[1] == crowded.tokens[1]


def test_connected_is_said_when_every_web_process_is_ready(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_module.configuration, "run_dir", lambda: tmp_path)
    caplog.set_level("INFO")
    bench = Bench()
    bench.worker.web_processes = 2
    for hello in (Hello(1, False), Hello(1, True), Hello(1, True)):
        bench.arrive(hello)
    bench.turn()
    assert not (tmp_path / "ready").exists()
    bench.arrive(Hello(2, True))
    bench.turn()
    assert (tmp_path / "ready").exists()
    assert "Connected" in caplog.messages


arrivals = st.tuples(
    st.integers(0, 12),  # the turn it comes in
    st.lists(st.integers(1, 49), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([b"a", b"b"]),
    st.one_of(st.none(), st.integers(0, 20)),  # the turn it is cancelled in
)
troubles = st.dictionaries(st.integers(0, 25), st.sampled_from(["prefill", "decode", "a is gone"]), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(arrivals, max_size=10), troubles)
def test_whatever_happens_everyone_gets_exactly_one_end_and_nothing_leaks(schedule, trouble):
    bench = Bench(max_concurrent_requests=6, max_total_tokens=24)
    for turn in range(30):
        for i, (arrives, prompt, most, peer, cancelled) in enumerate(schedule):
            if arrives == turn:
                bench.arrive(Generate(i, prompt, most), peer)
            if cancelled is not None and cancelled == turn:
                bench.arrive(Cancel(i, "test"), peer)
        bench.model.fail_next_prefill |= trouble.get(turn) == "prefill"
        bench.model.fail_next_decode |= trouble.get(turn) == "decode"
        if trouble.get(turn) == "a is gone":
            bench.arrive(Gone(), b"a")
        bench.arrive(Cancel(10**9, "keeps the loop from waiting"))
        bench.turn()
    bench.model.fail_next_prefill = bench.model.fail_next_decode = False
    bench.run()
    assert set(bench.ends) == set(range(len(schedule)))
    for i, (_arrives, prompt, most, _peer, _cancelled) in enumerate(schedule):
        expected = greedy(prompt, min(most, 24 - len(prompt)))
        assert bench.tokens[i] == expected[: len(bench.tokens[i])]
        if bench.ends[i] in ("length", "eos_token"):
            assert bench.tokens[i] == expected


def test_a_token_says_what_its_logits_say():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2, 3], 1, top_n_tokens=3))
    bench.run()
    (message,) = [m for _p, m in bench.wire.sent if isinstance(m, Tokens)]
    (token,) = message.tokens
    assert isinstance(token, Token)
    assert token.top[0] == (token.token, token.logprob)
    assert [lp for _i, lp in token.top] == sorted((lp for _i, lp in token.top), reverse=True)
