"""A worker on a fake model, without a socket or a thread: the test sends, runs the steps and reads what was published."""

import math
import os
import threading
from collections import defaultdict
from unittest import mock

import pytest
from engine_parts import settings_in
from fakes.model import EOS, FakeModel
from model_info import info_of
from processes import MODEL_CACHE

from config import Config, parse
from engine.adapter_changes import AdapterChanges
from engine.admission import Admission
from engine.metrics import Metrics
from engine.outputs import Publisher
from protocol import End, Generate, SubmitRequests, Tokens
from worker import Startup, Worker

WAIT_S = 60
ENGINES = {"supports_chunked_prefill": {"supports_chunked_prefill": True}, "chunks": {"prefill_chunk": 4}, "whole": {}}
REUSES = {  # engines that keep prefixes
    "in place": {"supports_chunked_prefill": True, "prefix_granularity": 1},
    "chunks": {"prefill_chunk": 4, "prefix_granularity": 4},
}
REUSES["copied"] = REUSES["in place"] | {"supports_prefix_copy": True}
on_every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


MODEL = info_of("m", None, "", 50, [EOS], 3, 39, 40, "fake", "float32", adapters={"a": "/a"})


class Wire:
    """In the place of Link."""

    def __init__(self):
        self.arrivals, self.sent = [], []
        self._interrupted = threading.Event()

    def receive(self, block):
        if block and not self.arrivals:  # but for grammars that a thread compiles
            assert self._interrupted.wait(WAIT_S), "the loop would wait for ever"
        self._interrupted.clear()
        arrivals, self.arrivals = self.arrivals, []
        return [arrival for arrival in arrivals if arrival]

    def send(self, peer, message):
        self.sent.append((peer, message))

    def report(self, phase, limit_s=math.inf):
        self.phase, self.limit_s = phase, limit_s

    def announce(self, info):
        self.info = info

    def interrupt(self):
        self.arrivals.append(None)
        self._interrupted.set()


class OutputThread:
    """In the place of the thread that publishes. `lag`: how many calls stay undone for the time being, in their order."""

    def __init__(self):
        self.calls, self.lag = [], 0

    def submit(self, call, *args):
        self.calls.append((call, args))
        self.catch_up(self.lag)

    def catch_up(self, lag=0):
        while len(self.calls) > lag:
            call, args = self.calls.pop(0)
            call(*args)

    def shutdown(self):
        self.catch_up()


class Oracle:
    """In the place of Lookup: guesses from the text that a request has without guesses, now and then a wrong one."""

    def __init__(self, text, chance):
        self.text, self.chance, self.done = text, chance, 0
        self.judged = []

    def add(self, tokens):
        self.done += len(tokens)

    def propose(self, most):
        draft_tokens = self.text[self.done : self.done + self.chance.randint(0, max(0, most))]
        return [token if self.chance.random() < 0.8 else 1 + token % 2 for token in draft_tokens]

    def record_acceptance(self, draft_tokens, accepted):
        self.judged.append((draft_tokens, accepted))


class NoMetrics:
    """In the place of Metrics, which take longer to make than a text to generate: for workers that others are compared with."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_args, **_options):
        return self


def is_idle(worker):
    """Whether it has no requests: all slots are free, and the queue is empty."""
    return not (worker.requests or worker.admission.count or worker.scheduler.busy or worker.scheduler.waiting)


class Driven:
    """A worker on a fake model, driven step by step. `served` is in the place of the fake model."""

    def __init__(
        self,
        max_concurrent_requests=100,
        grammars=None,
        served=None,
        read_adapter=None,
        metrics=None,
        settings=None,
        profiler=None,
        **model,
    ):
        self.wire, self.output_thread = Wire(), OutputThread()
        self.wire.announce(MODEL)
        metrics = metrics or Metrics("")
        config = settings_in(model)
        self.model = served or FakeModel(**model)
        self.admission = Admission(max_concurrent_requests)
        changes = read_adapter and AdapterChanges(self.model.adapters, read_adapter, self.wire, Config(**settings or {}))
        self.worker = Worker(
            model=self.model,
            config=config,
            eos_token_ids=frozenset([EOS]),
            link=self.wire,
            admission=self.admission,
            metrics=metrics,
            outputs=Publisher(self.wire, metrics, profiler, self.output_thread),
            grammars=grammars,
            adapter_changes=changes,
        )

    @property
    def is_idle(self):
        return is_idle(self.worker)

    def arrive(self, *messages, peer=b"web"):
        for message in messages:
            if isinstance(message, Generate):
                message = SubmitRequests([message])
            if isinstance(message, SubmitRequests) and (reason := self._admit(message)):
                self.wire.sent += [(peer, End(generate.id, reason)) for generate in message.generates]
            else:
                self.wire.arrivals.append((peer, message))

    def _admit(self, message):
        return self.admission.admit(len(message.generates), sum(len(image.pixels) for image in message.images))

    def step(self, times=1):
        for _ in range(times):
            self.worker.step()
            self.worker.outputs.flush()  # which the loop does when it runs the next step

    def run(self, at_most=500):
        """Steps until no request is known any more. Fails when something is left behind."""
        while self.wire.arrivals or self.output_thread.calls or not self.is_idle:
            if self.is_idle:
                self.output_thread.catch_up()
                self.wire.interrupt()
            self.step()
            at_most -= 1
            assert at_most, "requests are left over"

    def run_until_running(self, *requests, at_most=500):
        """Steps until these requests generate."""
        while not set(requests) <= set(self.running):
            self.step()
            at_most -= 1
            assert at_most, f"requests {requests} do not run"

    def each_call(self, action):
        """Calls `action(chunks)` before each call of the model from now on."""
        forward = self.model.forward
        self.model.forward = lambda chunks: (action(chunks), forward(chunks))[1]

    @property
    def running(self):
        return [request.generate.id for request in self.worker.scheduler.running]

    @property
    def tokens(self):
        """Request id → the token ids that were sent for it."""
        tokens = defaultdict(list)
        for _peer, message in self.wire.sent:
            for token in getattr(message, "tokens", []):
                tokens[token.id].append(token.token)
        return tokens

    @property
    def prompts(self):
        """Request id → its `PromptDone`, in the order of the first tokens; fails for a second one, or a token before it."""
        prompts, started = {}, set()
        for _peer, message in self.wire.sent:
            for prompt in getattr(message, "prompts", []):
                assert prompt.id not in prompts and prompt.id not in started
                prompts[prompt.id] = prompt
            started |= {token.id for token in getattr(message, "tokens", [])}
            assert started <= set(prompts), "a token before its prompt"
        return prompts

    @property
    def ends(self):
        """Request id → how it ended; fails when something follows a terminal message."""
        ends = {}
        for _peer, message in self.wire.sent:
            for item in message.tokens if isinstance(message, Tokens) else [message]:
                assert item.id not in ends, "something follows the terminal message"
                if isinstance(item, End):
                    ends[item.id] = item.reason
                elif getattr(item, "finish_reason", None):
                    ends[item.id] = item.finish_reason
        return ends


def boot(run_dir, *flags):
    """What the worker of a server with these flags tells the web processes, started here: it loads a folder's model on a CPU.

    Raises what ends its start.
    """
    # Another test of this process may have imported the simulated transformers-neuronx.
    config = parse(flags, {"MODEL_CACHE": str(MODEL_CACHE), "DEVICE": "cpu"})
    wire = Wire()
    with mock.patch.dict(os.environ, NEURON_TEXTGEN_RUN_DIR=str(run_dir)):
        worker = Startup(config, wire, Admission(1), Metrics("")).run()
    worker.drain()
    worker.run()  # which ends at once, and ends the worker's threads
    return wire.info
