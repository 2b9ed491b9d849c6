"""The socket between web processes and the worker: nothing is lost, order holds, and a process that is gone is noticed."""

import math
import queue
import sys
import threading

import msgspec
import pytest
from peer import Peer

import protocol
from engine import link
from engine.link import PeerLost, WorkerEnd
from protocol import (
    Cancel,
    End,
    Generate,
    Hello,
    Metrics,
    MetricsRequest,
    ModelInfo,
    Prompt,
    RequestStats,
    Sampling,
    Status,
    SubmitRequests,
    Token,
    Tokens,
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


def test_an_unexpected_error_of_the_sockets_thread_ends_the_thread(worker, monkeypatch):
    failures = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.put(failure.exc_type))
    worker.send(b"", End("no id", object()))  # cannot be encoded
    assert failures.get(timeout=WAIT_S) is TypeError


# What a web process that was taken over may send

WRONG = {
    "a temperature of 0": Sampling(1, temperature=0.0),
    "a temperature that is not a number": Sampling(1, temperature=math.nan),
    "a temperature without end": Sampling(1, temperature=math.inf),
    "a negative top_p": Sampling(1, top_p=-0.5),
    "a min_p above 1": Sampling(1, min_p=1.5),
    "a typical_p that is not a number": Sampling(1, typical_p=math.nan),
    "a repetition penalty of 0": Sampling(1, repetition_penalty=0.0),
    "a frequency penalty without end": Sampling(1, frequency_penalty=-math.inf),
    "a presence penalty that is not a number": Sampling(1, presence_penalty=math.nan),
    "a negative seed": Sampling(-1),
    "a negative top_k": Sampling(1, top_k=-1),
    "a top_k above 63 bits": Sampling(1, top_k=2**63),
    "a million biases": Sampling(1, logit_bias=[(1, 1.0)] * 10**6),
    "a bias that is not a number": Sampling(1, logit_bias=[(1, math.nan)]),
    "no requests": [],
    "an empty prompt": [Generate(1, [], 1)],
    "a negative token": [Generate(1, [-1], 1)],
    "no new tokens": [Generate(1, [1], 0)],
    "a negative id": [Generate(-1, [1], 1)],
    "fewer than no top tokens": [Generate(1, [1], 1, top_n_tokens=-3)],
    "a grammar of a megabyte": [Generate(1, [1], 1, grammar="a" * 10**6)],
    "a request id of a megabyte": [Generate(1, [1], 1, request_id="a" * 10**6)],
    "a reason of a megabyte": Cancel(1, "a" * 10**6),
    "a duration that is not a number": RequestStats(200, "success", math.nan),
    "a negative duration": RequestStats(200, "success", -1.0),
    "a status that HTTP does not have": RequestStats(10**6),
    "negative tokens": RequestStats(200, "success", generated_tokens=-1),
}


def received(message):
    if isinstance(message, Sampling):
        message = [Generate(1, [1], 1, sampling=message)]
    message = SubmitRequests(message) if isinstance(message, list) else message
    return protocol.decode(msgspec.msgpack.Decoder(protocol.FromWeb), [protocol.encode(message)])


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_numbers_out_of_range_are_not_decoded(message):
    assert received(message) is None


def test_the_extremes_that_clients_may_send_are_decoded():
    most, least = sys.float_info.max, 5e-324
    for sampling in (
        Sampling(2**64 - 1, most, 2**31 - 1, 1.0, 1.0, 1.0, most, 2.0, 2.0, [(2**32, 100.0)] * protocol.MAX_LOGIT_BIAS),
        Sampling(0, least, 0, least, 0.0, least, least, -2.0, -2.0, [(0, -100.0)]),
    ):
        assert received(sampling).generates[0].sampling == sampling


def test_the_loop_takes_a_limited_number_of_messages_at_a_time_in_their_order(worker, connect):
    web, count = connect(), 3 * link.MAX_PER_STEP
    for i in range(count):
        web.send(Cancel(i, ""))
    web.send(MetricsRequest(1))
    pieces = []
    while sum(map(len, pieces)) < count + 1:
        pieces.append(worker.receive(block=True, timeout=WAIT_S))
    assert max(map(len, pieces)) <= link.MAX_PER_STEP
    assert [message.id for piece in pieces for _, message in piece if isinstance(message, Cancel)] == list(range(count))


def test_a_flood_of_one_web_process_is_dropped_and_the_messages_of_another_arrive(worker_with, connect, monkeypatch):
    monkeypatch.setattr("engine.link.MAX_WAITING", 50)
    flooded = threading.Event()
    worker = worker_with(lambda _stats: flooded.set())
    web, other = connect(), connect()
    for i in range(1000):
        web.send(Cancel(i, ""))
    web.send(STATS)
    assert flooded.wait(WAIT_S)
    other.send(Cancel(5000, ""))
    arrived = receive(worker, 52)
    assert len(arrived) == 52 and [message for _, message in arrived if message == Cancel(5000, "")]
    web.send(Cancel(6000, ""))
    assert [message for _, message in receive(worker)] == [Cancel(6000, "")]


def test_what_is_to_be_sent_does_not_wait_until_a_flood_has_been_read(worker_with, connect):
    count, handled = 5 * link.MAX_PER_ROUND, []
    all_sent, is_due, is_read = threading.Event(), threading.Event(), threading.Event()

    def outputs():
        yield peer, End(1, "cancelled")
        is_due.set()

    def handle(message):
        assert all_sent.wait(WAIT_S)
        if not handled:
            worker.publish(outputs)
            assert is_due.wait(WAIT_S)
        handled.append(message)
        if len(handled) == count:
            assert is_read.wait(WAIT_S)

    worker = worker_with(handle)
    web, other = connect(), connect()
    other.send(Cancel(7, ""))
    peer = next(peer for peer, message in receive(worker, 3) if isinstance(message, Cancel))
    for _ in range(count):
        web.send(STATS)
    all_sent.set()
    assert other.next(End) == End(1, "cancelled")
    assert len(handled) < count
    is_read.set()


def test_metrics_are_rendered_once_for_all_who_ask_at_a_time(worker_with, connect):
    rendered = []

    def render(message):
        rendered.append(message)
        return Metrics(message.id, b"text")

    worker_with(render)
    web, other = connect(), connect()
    for i in range(1000):
        web.send(MetricsRequest(i))
    other.send(MetricsRequest(5000))
    assert other.next(Metrics) == Metrics(5000, b"text")
    assert len(rendered) < 10


def test_a_web_process_that_does_not_read_counts_as_gone(address, connect, monkeypatch):
    monkeypatch.setattr("engine.link.MAX_UNREAD", 100)
    worker = WorkerEnd(address)
    connect()
    ((peer, _),) = receive(worker)
    worker.publish(lambda: [(peer, End(i, "failed", "a" * 10_000)) for i in range(5000)])
    ((lost, message),) = receive(worker)
    assert (lost, message) == (peer, PeerLost())
    worker.close()


def test_a_web_process_that_sends_too_large_a_message_is_disconnected(address, connect, monkeypatch):
    monkeypatch.setattr("engine.link.MAX_MESSAGE_BYTES", 10_000)
    worker = WorkerEnd(address)
    web = connect()
    receive(worker)
    web.send(SubmitRequests([Generate(1, [1] * 20_000, 1)]))
    assert web.is_lost()
    worker.close()


def test_no_more_than_a_limited_number_of_web_processes_are_known(address, connect, monkeypatch):
    monkeypatch.setattr("engine.link.MAX_PEERS", 2)
    worker = WorkerEnd(address)
    webs = []
    for _ in range(2):
        webs.append(connect())
        receive(worker)
    connect().send(Cancel(1, ""))
    webs[0].send(Cancel(2, ""))
    assert [message for _, message in receive(worker)] == [Cancel(2, "")]
    worker.close()
