"""The socket between web processes and the worker: nothing is lost, order holds, and who is gone is noticed."""

import os
import queue
import threading

import pytest

from protocol import (
    Answered,
    AskMetrics,
    Cancel,
    End,
    Facts,
    Generate,
    GenerateAll,
    Gone,
    Hello,
    Metrics,
    Prompt,
    Sampling,
    Status,
    Token,
    Tokens,
    WebEnd,
    WorkerEnd,
)

WAIT_S = 20
FACTS = Facts("m", None, "/t", 50, [0], 4, 39, 40, "cpu", "float32")


class Web:
    """A web process' end that keeps what it gets."""

    def __init__(self, address):
        self.got = queue.SimpleQueue()
        self.lost = threading.Event()
        self.end = WebEnd(address, self.got.put, self.lost.set)
        self.end.send(Hello(1, False))

    def next(self, kind):
        """The next message of one kind; the others are skipped."""
        while not isinstance(message := self.got.get(timeout=WAIT_S), kind):
            pass
        return message


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/worker.sock"


@pytest.fixture
def worker(address):
    end = WorkerEnd(address)
    yield end
    end.close()


@pytest.fixture
def connect(address):
    webs = []

    def make():
        webs.append(Web(address))
        return webs[-1]

    yield make
    for web in webs:
        web.end.close()


def receive(worker, count=1):
    got = []
    while len(got) < count:
        arrived = worker.receive(block=True, timeout=WAIT_S)
        assert arrived, f"only {len(got)} of {count} messages came"
        got += arrived
    return got


def test_messages_arrive_as_they_were_sent(worker, connect):
    web = connect()
    sampling = Sampling(seed=2**64 - 1, temperature=0.5, top_k=3, presence_penalty=-0.5, logit_bias=[(7, -100.0), (8, 0.25)])
    asked = Generate(2**63 - 1, [1, 2, 3], 9, sampling, 5, min_new_tokens=2, ignore_eos=True, prompt_logprobs=True)
    request = GenerateAll([asked, Generate(1, [4], 1)])
    web.end.send(request)
    web.end.send(Cancel(7, "client hung up"))
    (peer, hello), (_, got), (_, cancel) = receive(worker, 3)
    assert (hello, got, cancel) == (Hello(1, False), request, Cancel(7, "client hung up"))
    prompts = [Prompt(1, 0.5, [-0.25], [[(5, -0.25), (6, -3.0)]]), Prompt(2, 0.0)]
    step = Tokens([Token(1, 5, -0.25, [(5, -0.25), (6, -3.0)], "eos_token"), Token(2, 6, -1.0), Token(3, 7, None)], prompts)
    worker.send(peer, step)
    assert web.next(Tokens) == step


def test_a_message_that_cannot_be_encoded_harms_only_who_sends_it(worker, connect):
    web = connect()
    with pytest.raises(OverflowError):
        web.end.send(Cancel(2**64, ""))
    web.end.send(Cancel(7, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(7, "")]


def test_each_web_process_gets_its_own_messages(worker, connect):
    first, second = connect(), connect()
    first.end.send(Cancel(1, ""))
    second.end.send(Cancel(2, ""))
    peers = {message.id: peer for peer, message in receive(worker, 4) if isinstance(message, Cancel)}
    worker.send(peers[1], End(1, "cancelled"))
    worker.send(peers[2], End(2, "cancelled"))
    assert (first.next(End).id, second.next(End).id) == (1, 2)


def test_nothing_is_dropped_and_order_holds_when_a_reader_is_slow(worker, connect):
    count = 5000  # ZeroMQ would drop silently beyond 1,000
    web = connect()
    ((peer, _),) = receive(worker)
    for i in range(count):
        worker.send(peer, Tokens([Token(i, i, -1.0)]))
    assert [web.next(Tokens).tokens[0].id for _ in range(count)] == list(range(count))


def test_facts_reach_who_was_there_and_who_comes_later(worker, connect):
    early = connect()
    receive(worker)
    worker.announce(FACTS)
    late = connect()
    assert early.next(Facts) == FACTS
    assert late.next(Facts) == FACTS


def test_the_state_of_the_worker_is_told_without_being_asked(worker, connect):
    web = connect()
    worker.report(Status("loading", 1.0, steps=1))
    while web.next(Status) != Status("loading", 1.0, steps=1):
        pass
    worker.report(Status("loading", 2.0, steps=2))
    while web.next(Status) != Status("loading", 2.0, steps=2):
        pass


def test_a_web_process_that_ends_is_reported_once(worker, connect):
    web, other = connect(), connect()
    peers = [peer for peer, _ in receive(worker, 2)]
    web.end.close()
    ((peer, message),) = receive(worker)
    assert isinstance(message, Gone)
    assert peer in peers
    worker.send(peer, End(1, "late"))
    other.end.send(Cancel(5, ""))
    assert [message for _, message in receive(worker)] == [Cancel(5, "")]


def test_a_worker_that_ends_is_noticed_after_its_last_words(worker, connect):
    web = connect()
    ((peer, _),) = receive(worker)
    worker.send(peer, End(1, "failed", "the server is stopping"))
    worker.close()
    assert web.next(End).message == "the server is stopping"
    assert web.lost.wait(WAIT_S)


def test_a_message_that_is_none_of_ours_harms_nobody(worker, connect):
    web = connect()
    receive(worker)
    web.end.send(FACTS)  # not for the worker
    web.end.send(Cancel(5, ""))
    assert [message for _, message in receive(worker)] == [Cancel(5, "")]


def test_waiting_for_messages_can_be_interrupted(worker):
    threading.Timer(0.05, worker.interrupt).start()
    assert worker.receive(block=True, timeout=WAIT_S) == []


def test_closing_twice_is_once(worker, connect):
    web = connect()
    receive(worker)
    web.end.close()
    web.end.close()
    worker.close()
    worker.close()


def test_two_servers_do_not_meet(tmp_path):
    ends = [WorkerEnd(f"ipc://{tmp_path}/{name}.sock") for name in "ab"]
    webs = [Web(f"ipc://{tmp_path}/{name}.sock") for name in "ab"]
    for number, web in enumerate(webs):
        web.end.send(Cancel(number, ""))
    for number, end in enumerate(ends):
        assert [m.id for _, m in receive(end, 2) if isinstance(m, Cancel)] == [number]
    for end in [web.end for web in webs] + ends:
        end.close()


ANSWERED = Answered(200, "success", 3.0, 0.1, 0.2, 2.5, 0.5, 10, 20, 30)


@pytest.fixture
def worker_with(address):
    """Makes a worker's end with a function for the messages that go past the loop."""
    ends = []

    def make(on_aside):
        ends.append(WorkerEnd(address, on_aside))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


def test_what_goes_past_the_loop_is_answered_while_the_loop_reads_nothing(worker_with, connect):
    heard = []

    def answer(message):
        heard.append(message)
        return Metrics(message.id, b"text") if isinstance(message, AskMetrics) else None

    worker = worker_with(answer)
    web, other = connect(), connect()
    web.end.send(ANSWERED)
    web.end.send(AskMetrics(7))
    other.end.send(AskMetrics(8))
    assert web.next(Metrics) == Metrics(7, b"text")
    assert other.next(Metrics) == Metrics(8, b"text")
    assert sorted(heard, key=str) == sorted([ANSWERED, AskMetrics(7), AskMetrics(8)], key=str)
    web.end.send(Cancel(5, ""))
    assert sorted(map(str, (message for _, message in receive(worker, 3)))) == [str(Cancel(5, ""))] + [str(Hello(1, False))] * 2


def test_a_failure_past_the_loop_is_logged_and_harms_nobody(worker_with, connect, caplog):
    worker = worker_with(lambda message: Metrics(message.id, b"") if message.id else 1 // 0)
    web = connect()
    web.end.send(AskMetrics(0))
    web.end.send(AskMetrics(1))
    web.end.send(Cancel(5, ""))
    assert web.next(Metrics) == Metrics(1, b"")
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(5, "")]
    assert "AskMetrics could not be handled" in caplog.text


def test_what_goes_past_the_loop_is_dropped_where_nobody_takes_it(worker, connect):
    web = connect()
    web.end.send(AskMetrics(1))
    web.end.send(ANSWERED)
    web.end.send(Cancel(5, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(5, "")]


def test_what_is_refused_hears_it_at_once_while_the_loop_reads_nothing(worker, connect):
    worker.refuses = lambda message: "overloaded" if len(message.generates) > 1 else None
    web = connect()
    web.end.send(GenerateAll([Generate(1, [1], 1), Generate(2, [1], 1)]))
    web.end.send(GenerateAll([Generate(3, [1], 1)]))
    assert [web.next(End), web.next(End)] == [End(1, "overloaded"), End(2, "overloaded")]
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), GenerateAll([Generate(3, [1], 1)])]


def test_the_socket_thread_gives_way_where_it_may(worker, connect, monkeypatch):
    worker.give_way()
    assert os.sched_getscheduler(worker._thread.native_id) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "and nobody else does"

    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    worker.give_way()
    web = connect()
    web.end.send(Cancel(5, ""))
    assert receive(worker, 2)
