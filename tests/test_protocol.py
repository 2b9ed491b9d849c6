"""The socket between web processes and the worker: nothing is lost, order holds, and a process that is gone is noticed."""

import queue
import threading

import pytest
from peer import Peer

from protocol import (
    Cancel,
    End,
    Generate,
    Hello,
    Metrics,
    MetricsRequest,
    ModelInfo,
    PeerLost,
    Prompt,
    RequestStats,
    Sampling,
    Status,
    SubmitRequests,
    Token,
    Tokens,
    WorkerEnd,
)

WAIT_S = 20
INFO = ModelInfo("m", None, "/t", 50, [0], 4, 39, 40, "cpu", "float32")


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
        webs.append(Peer(address))
        return webs[-1]

    yield make
    for web in webs:
        web.close()


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
    generate = Generate(2**63 - 1, [1, 2, 3], 9, sampling=sampling, top_n_tokens=5, min_new_tokens=2, prompt_logprobs=True)
    request = SubmitRequests([generate, Generate(1, [4], 1)])
    web.send(request)
    web.send(Cancel(7, "client hung up"))
    (peer, hello), (_, got), (_, cancel) = receive(worker, 3)
    assert (hello, got, cancel) == (Hello(1, False), request, Cancel(7, "client hung up"))
    prompts = [Prompt(1, 0.5, 3, [-0.25], [[(5, -0.25), (6, -3.0)]]), Prompt(2, 0.0)]
    step = Tokens([Token(1, 5, -0.25, [(5, -0.25), (6, -3.0)], "eos_token"), Token(2, 6, -1.0), Token(3, 7, None)], prompts)
    worker.send(peer, step)
    assert web.next(Tokens) == step


def test_a_message_that_cannot_be_encoded_fails_at_its_sender_alone(worker, connect):
    web = connect()
    with pytest.raises(OverflowError):
        web.send(Cancel(2**64, ""))
    web.send(Cancel(7, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(7, "")]


def test_each_web_process_gets_its_own_messages(worker, connect):
    first, second = connect(), connect()
    first.send(Cancel(1, ""))
    second.send(Cancel(2, ""))
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


def test_the_model_info_reaches_web_processes_that_are_there_and_those_that_come_later(worker, connect):
    early = connect()
    receive(worker)
    worker.announce(INFO)
    late = connect()
    assert early.next(ModelInfo) == INFO
    assert late.next(ModelInfo) == INFO


def test_the_status_of_the_worker_comes_unasked(worker, connect):
    web = connect()
    worker.report(Status("loading", steps=1))
    while web.next(Status) != Status("loading", steps=1):
        pass
    worker.report(Status("loading", steps=2))
    while web.next(Status) != Status("loading", steps=2):
        pass


def test_a_web_process_that_ends_is_reported_once(worker, connect):
    web, other = connect(), connect()
    peers = [peer for peer, _ in receive(worker, 2)]
    web.close()
    ((peer, message),) = receive(worker)
    assert isinstance(message, PeerLost)
    assert peer in peers
    worker.send(peer, End(1, "late"))
    other.send(Cancel(5, ""))
    assert [message for _, message in receive(worker)] == [Cancel(5, "")]


def test_a_worker_that_ends_is_noticed_after_its_last_message(worker, connect):
    web = connect()
    ((peer, _),) = receive(worker)
    worker.send(peer, End(1, "failed", "the server is stopping"))
    worker.close()
    assert web.next(End).message == "the server is stopping"
    assert web.is_lost()


def test_a_message_of_an_unknown_kind_is_dropped(worker, connect):
    web = connect()
    receive(worker)
    web.send(INFO)  # not for the worker
    web.send(Cancel(5, ""))
    assert [message for _, message in receive(worker)] == [Cancel(5, "")]


def test_waiting_for_messages_can_be_interrupted(worker):
    threading.Timer(0.05, worker.interrupt).start()
    assert worker.receive(block=True, timeout=WAIT_S) == []


def test_closing_twice_is_once(worker, connect):
    web = connect()
    receive(worker)
    web.close()
    web.close()
    worker.close()
    worker.close()


def test_two_servers_do_not_meet(tmp_path):
    ends = [WorkerEnd(f"ipc://{tmp_path}/{name}.sock") for name in "ab"]
    webs = [Peer(f"ipc://{tmp_path}/{name}.sock") for name in "ab"]
    for number, web in enumerate(webs):
        web.send(Cancel(number, ""))
    for number, end in enumerate(ends):
        assert [m.id for _, m in receive(end, 2) if isinstance(m, Cancel)] == [number]
    for end in webs + ends:
        end.close()


STATS = RequestStats(200, "success", 3.0, 0.1, 0.2, 2.5, 0.5, 10, 20, 30)


@pytest.fixture
def worker_with(address):
    """Makes a worker's end with functions of the test's own."""
    ends = []

    def make(*functions):
        ends.append(WorkerEnd(address, *functions))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


def test_immediate_messages_are_handled_while_the_loop_reads_nothing(worker_with, connect):
    handled = []

    def handle(message):
        handled.append(message)
        return Metrics(message.id, b"text") if isinstance(message, MetricsRequest) else None

    worker = worker_with(handle)
    web, other = connect(), connect()
    web.send(STATS)
    web.send(MetricsRequest(7))
    other.send(MetricsRequest(8))
    assert web.next(Metrics) == Metrics(7, b"text")
    assert other.next(Metrics) == Metrics(8, b"text")
    assert STATS in handled and {type(message) for message in handled} == {RequestStats, MetricsRequest}
    web.send(Cancel(5, ""))
    assert sorted(map(str, (message for _, message in receive(worker, 3)))) == [str(Cancel(5, ""))] + [str(Hello(1, False))] * 2


def test_an_immediate_message_that_cannot_be_handled_is_logged_and_dropped(worker_with, connect, caplog):
    worker = worker_with(lambda message: Metrics(message.id, b"") if isinstance(message, MetricsRequest) else 1 // 0)
    web = connect()
    web.send(STATS)
    web.send(MetricsRequest(1))
    web.send(Cancel(5, ""))
    assert web.next(Metrics) == Metrics(1, b"")
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(5, "")]
    assert "RequestStats could not be handled" in caplog.text


def test_immediate_messages_never_reach_the_loop(worker, connect):
    web = connect()
    web.send(MetricsRequest(1))
    web.send(STATS)
    web.send(Cancel(5, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), Cancel(5, "")]


def test_a_refusal_is_sent_at_once_while_the_loop_reads_nothing(worker, connect):
    worker.refuses = lambda message: ("overloaded", "") if len(message.generates) > 1 else None
    web = connect()
    web.send(SubmitRequests([Generate(1, [1], 1), Generate(2, [1], 1)]))
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    assert [web.next(End), web.next(End)] == [End(1, "overloaded"), End(2, "overloaded")]
    assert [message for _, message in receive(worker, 2)] == [Hello(1, False), SubmitRequests([Generate(3, [1], 1)])]


def test_published_messages_are_made_on_the_sockets_thread_and_keep_their_order(worker, connect):
    web = connect()
    ((peer, _),) = receive(worker)
    threads = []

    def make_messages():
        for i in (1, 2):
            threads.append(threading.current_thread())
            yield peer, End(i, "failed")

    worker.publish(make_messages)
    worker.send(peer, End(3, "cancelled"))
    assert [web.next(End).id for _ in range(3)] == [1, 2, 3]
    assert threading.current_thread() not in threads


def test_an_error_while_messages_are_made_costs_the_rest_of_these_messages_alone(worker, connect, caplog):
    web = connect()
    ((peer, _),) = receive(worker)

    def make_messages():
        yield peer, End(1, "failed")
        raise RuntimeError("on purpose")

    worker.publish(make_messages)
    worker.send(peer, End(2, "cancelled"))
    assert [web.next(End).id for _ in range(2)] == [1, 2]
    assert "the outputs of a step could not be published" in caplog.text


def test_an_unexpected_error_of_the_sockets_thread_is_reported_to_the_worker(worker_with, connect):
    failures = queue.SimpleQueue()
    worker = worker_with(lambda _message: None, failures.put)
    worker.send(b"", End("no id", object()))  # cannot be encoded
    assert isinstance(failures.get(timeout=WAIT_S), TypeError)
