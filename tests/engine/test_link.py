"""The socket between web processes and the worker: nothing is lost, order holds, and a process that is gone is noticed."""

import itertools
import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from model_info import info_of
from peer import Peer

from engine import link
from engine.admission import Admission
from engine.link import Link, PeerLost
from engine.metrics import Metrics
from protocol import (
    MAX_IMAGE_TOKENS,
    Cancel,
    End,
    Generate,
    Hello,
    Image,
    MetricsRequest,
    MetricsText,
    ModelInfo,
    PromptDone,
    RequestStats,
    SamplingParams,
    Status,
    SubmitRequests,
    Token,
    Tokens,
    encode,
)

WAIT_S = 60
INFO = info_of("m", None, "/t", 50, [0], 4, 39, 40, "cpu", "float32")
STATS = RequestStats(404)


class Counting(Metrics):
    """Notes on which thread it is used."""

    def __init__(self):
        super().__init__("")
        self.recorded, self.rendered = [], 0

    def record(self, stats):
        self.recorded.append(stats)

    def render(self):
        self.rendered += 1
        return b"text"


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/worker.sock"


@pytest.fixture
def metrics():
    return Counting()


@pytest.fixture
def admission():
    return Admission(limit=100)


@pytest.fixture
def worker(address, metrics, admission):
    link = Link(address, metrics, admission)
    yield link
    link.close()


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
        got += worker.receive(block=True)
    return got


def test_messages_arrive_as_they_were_sent(worker, connect):
    web = connect()
    sampling = SamplingParams(
        seed=2**64 - 1, temperature=0.5, top_k=3, presence_penalty=-0.5, logit_bias=[(7, -100.0), (8, 0.25)]
    )
    generate = Generate(2**63 - 1, [1, 2, 3], 9, sampling=sampling, top_n_tokens=5, min_new_tokens=2, prompt_logprobs=True)
    request = SubmitRequests([generate, Generate(1, [4], 1)])
    web.send(request)
    web.send(Cancel(7, "client hung up"))
    (peer, hello), (_, got), (_, cancel) = receive(worker, 3)
    assert (hello, got, cancel) == (Hello(False), request, Cancel(7, "client hung up"))
    prompts = [PromptDone(1, 0.5, 3, [(-0.25, [(5, -0.25), (6, -3.0)])]), PromptDone(2, 0.0)]
    step = Tokens([Token(1, 5, -0.25, [(5, -0.25), (6, -3.0)], "eos_token"), Token(2, 6, -1.0), Token(3, 7, None)], prompts)
    worker.send(peer, step)
    assert web.next(Tokens) == step


def test_a_message_that_cannot_be_encoded_fails_at_its_sender_alone(worker, connect):
    web = connect()
    with pytest.raises(OverflowError):
        web.send(Cancel(2**64, ""))
    web.send(Cancel(7, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(False), Cancel(7, "")]


def test_each_web_process_gets_its_own_messages(worker, connect):
    first, second = connect(), connect()
    first.send(Cancel(1, ""))
    second.send(Cancel(2, ""))
    peers = {message.id: peer for peer, message in receive(worker, 4) if isinstance(message, Cancel)}
    worker.send(peers[1], End(1, "cancelled"))
    worker.send(peers[2], End(2, "cancelled"))
    assert (first.next(End).id, second.next(End).id) == (1, 2)


def test_nothing_is_dropped_and_order_holds_when_a_reader_is_slow(worker, connect):
    count = 20_000  # ZeroMQ would drop silently beyond 1,000
    web = connect()
    ((peer, _),) = receive(worker)
    for i in range(count):
        worker.send(peer, Tokens([Token(i, i, -1.0)]))
    worker.send(peer, End(count, "cancelled"))
    assert [web.next(Tokens).tokens[0].id for _ in range(count)] == list(range(count))
    assert web.next(End) == End(count, "cancelled")


def test_the_model_info_reaches_web_processes_that_are_there_and_those_that_come_later(worker, connect):
    early = connect()
    receive(worker)
    worker.announce(INFO)
    late = connect()
    assert early.next(ModelInfo) == INFO
    assert late.next(ModelInfo) == INFO


def test_the_status_of_the_worker_comes_unasked(worker, connect):
    web = connect()
    for phase in ("loading", "compiling"):
        worker.report(phase)
        while web.next(Status) != Status(phase):
            pass


def test_a_step_is_late_after_its_limit_and_not_because_the_whole_machine_stood_still(worker, connect, monkeypatch):
    offset_s = 0.0
    monkeypatch.setattr(
        link, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + offset_s, thread_time=time.thread_time)
    )
    web = connect()
    worker.report("ready", 3 * link.HEARTBEAT_S)
    while web.next(Status).phase != "ready":
        pass
    offset_s = 60
    late = [web.next(Status).late for _ in range(6)]
    assert late[-1] and not late[0]
    worker.report("draining")
    while (status := web.next(Status)).phase != "draining":
        pass
    assert not status.late


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


def test_the_loss_of_a_web_process_is_reported_behind_its_last_request(worker, connect, metrics):
    disconnected = worker._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rendering, go_on = threading.Event(), threading.Event()
    metrics.render = lambda: (rendering.set(), go_on.wait(WAIT_S), b"")[-1]
    web = connect()
    ((peer, _hello),) = receive(worker)
    web.send(MetricsRequest(1))
    assert rendering.wait(WAIT_S)
    web.send(SubmitRequests([Generate(1, [1], 5)]))
    web.close(linger_ms=WAIT_S * 1000)
    assert disconnected.poll(WAIT_S * 1000)
    worker.send(peer, End(0, "cancelled"))
    go_on.set()
    kinds = []
    while kinds[-2:] != [SubmitRequests, PeerLost]:
        kinds += [type(message) for _peer, message in receive(worker)]


def test_a_worker_that_ends_is_noticed_after_its_last_message(worker, connect):
    web = connect()
    ((peer, _),) = receive(worker)
    worker.send(peer, End(1, "failed", "the server is stopping"))
    worker.close()
    assert web.next(End).message == "the server is stopping"
    assert web.is_lost()


@pytest.mark.parametrize("wrong", [{"sampling": {"min_p": "much"}}, {"max_new_tokens": None}, {"prompt": [1.5]}], ids=str)
def test_a_request_that_cannot_be_decoded_ends_with_an_error_and_no_client_waits(worker, connect, admission, caplog, wrong):
    web = connect()
    generates = [msgspec.to_builtins(Generate(id, [1], 5)) for id in (1, 2)]
    web.send_bytes(msgspec.msgpack.encode({"type": "submit", "generates": [generates[0], generates[1] | wrong]}))
    ends = [web.next(End), web.next(End)]
    assert ends == [End(id, "failed", "the worker cannot read the request") for id in (1, 2)]
    assert admission.count == 0 and "cannot be decoded" in caplog.text


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x82\xa4type\xa6cancel\xa6reason\xa2\xff\xfe", msgspec.msgpack.encode(INFO)])
def test_what_is_no_message_is_logged_and_the_next_one_is_read(worker, connect, caplog, body):
    web = connect()
    web.send_bytes(body)
    web.send(Cancel(5, ""))
    assert [message for _, message in receive(worker, 2)] == [Hello(False), Cancel(5, "")]
    assert "cannot be decoded" in caplog.text


def test_waiting_for_messages_can_be_interrupted(worker):
    threading.Timer(0.05, worker.interrupt).start()
    assert worker.receive(block=True) == []


def test_closing_twice_is_once(worker, connect):
    web = connect()
    receive(worker)
    web.close()
    web.close()
    worker.close()
    worker.close()


def test_metrics_are_answered_and_counted_while_the_loop_reads_nothing(worker, connect, metrics):
    web, other = connect(), connect()
    web.send(STATS)
    web.send(MetricsRequest(7))
    other.send(MetricsRequest(8))
    assert (web.next(MetricsText), other.next(MetricsText)) == (MetricsText(7, b"text"), MetricsText(8, b"text"))
    assert metrics.recorded == [STATS]
    web.send(Cancel(5, ""))
    assert sorted(map(str, (message for _, message in receive(worker, 3)))) == [str(Cancel(5, ""))] + [str(Hello(False))] * 2


def test_metrics_are_rendered_once_for_all_who_ask_at_a_time(worker, connect, metrics):
    rendering, go_on = threading.Event(), threading.Event()
    render = metrics.render
    metrics.render = lambda: (rendering.set(), go_on.wait(WAIT_S), render())[-1]
    web, other = connect(), connect()
    web.send(MetricsRequest(0))
    assert rendering.wait(WAIT_S)
    for i in range(1, 1000):
        web.send(MetricsRequest(i))
    other.send(MetricsRequest(5000))
    go_on.set()
    assert other.next(MetricsText) == MetricsText(5000, b"text")
    assert metrics.rendered < 100  # they may come in several groups


def work(cost_s):
    began_s = time.thread_time()
    while time.thread_time() - began_s < cost_s:
        pass
    return b"text"


def test_a_client_that_asks_for_metrics_again_and_again_takes_little_of_the_workers_time(worker, connect, metrics):
    cost_s, times, begun_at = 0.01, 3, []
    metrics.render = lambda: (begun_at.append(time.monotonic()), work(cost_s))[-1]
    web = connect()
    for i in range(1 + times):
        web.send(MetricsRequest(i))
        web.next(MetricsText)
    assert times * cost_s < 0.06 * (begun_at[-1] - begun_at[0])


def test_metrics_that_took_long_once_are_answered_the_next_time(worker, connect, metrics, monkeypatch):
    seconds = itertools.count(0, 100)  # that the first time takes, as in a full collection of the interpreter's memory
    fake = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: next(seconds))
    monkeypatch.setattr(link, "time", fake)
    web = connect()
    for i in range(2):
        web.send(MetricsRequest(i))
        web.next(MetricsText)


def test_a_refusal_is_sent_at_once_while_the_loop_reads_nothing(worker, connect, admission):
    admission.limit = 1
    web = connect()
    web.send(SubmitRequests([Generate(1, [1], 1), Generate(2, [1], 1)]))
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    assert [web.next(End), web.next(End)] == [End(1, "overloaded"), End(2, "overloaded")]
    assert [message for _, message in receive(worker, 2)] == [Hello(False), SubmitRequests([Generate(3, [1], 1)])]


def test_what_a_process_sends_in_a_wrong_way_ends_that_message_and_nothing_else(worker, connect, admission):
    worker.announce(INFO)
    web = connect()
    whole = encode(SubmitRequests([Generate(1, [1], 1)]))
    for frames in ([b""], [b"", b""], [whole, whole], [whole[:9], b"", whole[9:-1]]):
        web.send_bytes(*frames)
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    assert [message for _, message in receive(worker, 2)] == [Hello(False), SubmitRequests([Generate(3, [1], 1)])]
    assert (admission.count, admission.pixel_bytes) == (1, 0)


def test_a_request_whose_images_find_no_room_is_refused_at_once(worker, connect, admission, monkeypatch):
    worker.announce(msgspec.structs.replace(INFO, reads_images=True))
    monkeypatch.setattr("engine.admission.MAX_WAITING_PIXEL_BYTES", 25)
    web = connect()
    image = Image(2**46 - 1, MAX_IMAGE_TOKENS, (1, 2, 2), bytes(12))
    for number in (1, 2, 3, 4):
        web.send(SubmitRequests([Generate(number, list(image.ids)[-2:], 1)], [image]))
    assert [web.next(End), web.next(End)] == [End(3, "overloaded"), End(4, "overloaded")]
    _hello, (_peer, message), _second = receive(worker, 3)
    assert message.images == [image] and message.generates[0].prompt == [2 - 2**62, 1 - 2**62]
    admission.release_pixels(12)
    web.send(SubmitRequests([Generate(5, [1], 1)], [image]))
    assert receive(worker, 1)


def test_web_processes_learn_at_once_that_there_is_no_more_room(worker, connect, admission):
    admission.limit = 1
    web, other = connect(), connect()
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    while not other.next(Status).full:
        pass


def test_a_status_that_was_made_before_the_last_place_was_taken_does_not_offer_it_again(worker, connect, admission):
    admission.limit = 1
    web = connect()
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    while not web.next(Status).full:
        pass
    worker.report("ready")  # the loop counted its requests before this one came
    worker.report("draining")
    statuses = [web.next(Status)]
    while statuses[-1].phase != "draining":
        statuses.append(web.next(Status))
    assert all(status.full for status in statuses)


def test_web_processes_learn_that_there_is_room_before_they_get_the_answer_that_made_it(worker, connect, admission):
    admission.limit = 1
    web = connect()
    web.send(SubmitRequests([Generate(3, [1], 1)]))
    (peer, _hello), _submit = receive(worker, 2)
    admission.release()
    worker.send(peer, End(3, "cancelled"))
    known = [web.next()]
    while not isinstance(known[-1], End):
        known.append(web.next())
    statuses = [message for message in known if isinstance(message, Status)]
    assert [status.full for status in statuses[-2:]] == [True, False]


def test_an_unexpected_error_of_the_sockets_thread_ends_the_thread(worker, monkeypatch):
    failures = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.put(failure.exc_type))
    worker.send(b"", End("no id", object()))  # cannot be encoded
    assert failures.get(timeout=WAIT_S) is TypeError
