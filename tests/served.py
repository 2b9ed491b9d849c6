"""An app with everything behind it but a device: a real worker on a fake model, and a tokenizer of bytes."""

import json
import threading
import time

import msgspec
from fakes.model import EOS, FakeModel, greedy
from fakes.tokenizer import VOCABULARY, byte_tokenizer

import web
from config import Config
from metrics import Metrics
from protocol import Facts, WorkerEnd
from worker import Worker

WAIT_S = 20
WINDOW = 60
LIMITS = {"max_concurrent_requests": 6, "payload_limit": 5000}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


class Served:
    """An app, the worker behind it, and the model behind that."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.tokenizer = byte_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        sampling = settings.get("sampling", "host")
        self.model = FakeModel(batch_size=2, max_total_tokens=WINDOW, vocab_size=VOCABULARY, sampling=sampling)
        address = f"ipc://{folder}/worker.sock"
        self.metrics = Metrics()
        self.end = WorkerEnd(address, on_aside=self.metrics.aside)
        self.worker = Worker(self.model, self.end, frozenset([EOS]), LIMITS["max_concurrent_requests"], metrics=self.metrics)
        self.seen = web.Worker(address)
        self.config = Config(**LIMITS | settings)
        self.client = web.create_app(self.config, self.seen).test_client()
        limits = (VOCABULARY, [EOS], 2, WINDOW - 1, WINDOW)
        facts = Facts("m", None, str(folder), *limits, "fake", "float32", model_dir=str(folder), sampling=sampling)
        self.facts = msgspec.structs.replace(facts, prompt_logprobs=self.model.gives_prompt_logits)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)

    def get_ready(self):
        self.end.announce(self.facts)
        self.thread.start()
        wait_until(lambda: self.seen.phase == "ready")
        return self

    def post(self, route, body, **options):
        options.setdefault("content_type", "application/json")
        return self.client.post(route, data=body if isinstance(body, bytes) else json.dumps(body), **options)

    def expected(self, text, most):
        return greedy(self.tokenizer.encode(text).ids, most, VOCABULARY)

    def assert_idle(self):
        wait_until(lambda: not self.worker._known and not self.seen._inboxes)
        assert self.worker.slots.busy == self.worker._places_taken == 0

    def close(self):
        self.model.may_decode.set()
        self.worker.stop()
        if self.thread.is_alive():
            self.thread.join(WAIT_S)
        self.end.close()
        self.seen._end.close()


def wait_until(holds, at_most_s=WAIT_S):
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def events(response):
    text = response.get_data(as_text=True)
    assert text.endswith("\n\n")
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]
