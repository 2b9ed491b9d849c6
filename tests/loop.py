"""A worker on a fake model, without a socket or a thread: the test sends, runs the steps and reads what was published."""

from collections import defaultdict
from math import inf

import pytest
from fakes.model import EOS, FakeModel

from engine.scheduler import Scheduler
from protocol import End, Generate, Status, SubmitRequests, Tokens
from worker import Worker

ENGINES = {"mixes": {"mixes": True}, "chunks": {"prefill_chunk": 4}, "whole": {}}
on_every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


class Wire:
    """In the place of WorkerEnd. `lag`: how many outgoing items stay unsent for the time being, in their order."""

    def __init__(self):
        self.arrivals, self.sent, self.outbox = [], [], []
        self.lag = 0
        self.status = Status("starting")

    def receive(self, block):
        assert self.arrivals or not block, "the loop would wait for ever"
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def send(self, peer, message):
        self.publish(lambda: [(peer, message)])

    def publish(self, make_messages):
        self.outbox.append(make_messages)
        self.deliver(self.lag)

    def deliver(self, lag=0):
        while len(self.outbox) > lag:
            self.sent += self.outbox.pop(0)()

    def report(self, status):
        self.status = status

    def interrupt(self, message=None):
        self.arrivals += [(b"", message)] if message else []


class Driven:
    """A worker on a fake model, driven step by step."""

    def __init__(
        self,
        max_concurrent_requests=100,
        prefill_budget=None,
        max_queue_time_s=inf,
        waiting_served_ratio=0.0,
        max_waiting_tokens=20,
        web_processes=0,
        grammars=None,
        served=None,  # in the place of the fake model
        **model,
    ):
        self.wire = Wire()
        self.model = served or FakeModel(**model)
        scheduler = Scheduler(
            slots=self.model.batch_size,
            mixes=self.model.mixes,
            prefill_chunk=self.model.prefill_chunk,
            max_batch_prefill_tokens=prefill_budget,
            max_queue_time_s=max_queue_time_s,
            waiting_served_ratio=waiting_served_ratio,
            max_waiting_tokens=max_waiting_tokens,
            prefix_step=self.model.prefix_step,
            copies_prefixes=self.model.copies_prefixes,
        )
        more = {"web_processes": web_processes, "grammars": grammars}
        self.worker = Worker(self.model, self.wire, frozenset([EOS]), scheduler, max_concurrent_requests, **more)

    def arrive(self, *messages, peer=b"web"):
        for message in messages:
            if isinstance(message, Generate):
                message = SubmitRequests([message])
            if isinstance(message, SubmitRequests) and (refusal := self.wire.refuses(message)):
                self.wire.sent += [(peer, End(generate.id, *refusal)) for generate in message.generates]
            else:
                self.wire.arrivals.append((peer, message))

    def step(self, times=1):
        """Steps of the loop; outputs are handed over after each, and not first when the next one begins."""
        for _ in range(times):
            self.worker.step()
            self.worker.flush_outputs()

    def run(self, at_most=500):
        """Steps until no request is known any more. Fails when something is left behind."""
        while self.wire.arrivals or not self.worker.is_idle:
            self.step()
            at_most -= 1
            assert at_most, "requests are left over"
        self.wire.deliver()

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
        """Request id → its `Prompt`, in the order of the first tokens; fails for a second one, or a token before it."""
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
                elif item.finish_reason:
                    ends[item.id] = item.finish_reason
        return ends
