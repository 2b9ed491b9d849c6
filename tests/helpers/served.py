"""An app with a real worker on a fake model behind it, and a tokenizer of bytes."""

import functools
import json
import threading
import time

import gevent
import msgspec
from fakes.model import ADAPTER, EOS, ImageModel, greedy
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from grammars import grammars_of
from loop import is_idle
from model_info import info_of
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

import web
from api.generation.prepared_request import ModelText
from api.http.engine_client import EngineClient
from api.openai import responses
from config import Config
from engine.adapter_changes import AdapterChanges
from engine.admission import Admission
from engine.link import Link
from engine.metrics import Metrics
from engine.outputs import Publisher
from engine.sampling import sampling
from models.errors import ModelError
from worker import Worker

responses.SUMMARIZE = "Sum up"  # the context of the model here is short
WAIT_S = 60
# A model that mixes prompts and decodes and reuses prefixes.
REUSING = {"supports_chunked_prefill": True, "prefix_granularity": 1, "supports_prefix_copy": True}
WINDOW = 60
LIMITS = {"max_concurrent_requests": 6, "payload_limit": 5000}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


# What every server here would make anew, and which takes longer than most tests: made once in a process.
compile_loops = functools.cache(lambda: sampling.compile_loops(["float32"]))


@functools.cache
def grammars_for(tokenizer_json):
    return grammars_of(Tokenizer.from_str(tokenizer_json), VOCABULARY, [EOS])


class PausableModel(ImageModel):
    """A model whose decode steps can be held up and whose next steps can fail."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.may_decode = threading.Event()  # cleared: the device hangs in its next decode step
        self.may_decode.set()
        self.fail_next_prefill = self.fail_next_decode = self.is_paused = False

    def forward(self, chunks):
        is_prefill = chunks[0].begin == 0 or len(chunks[0].tokens) > 1
        if not is_prefill:
            self.is_paused = not self.may_decode.is_set()
            assert self.may_decode.wait(60)
        if self.fail_next_prefill if is_prefill else self.fail_next_decode:
            self.fail_next_prefill = self.fail_next_decode = False
            raise RuntimeError("on purpose")
        return super().forward(chunks)


SHARED_LABELS = ("le", "model_name", "engine")


class Served:
    """An app, the worker behind it, and the model behind that."""

    def __init__(self, folder, slots=2, prefill_chunk=None, adapters=(), snapshots=None, **settings):
        self.folder = folder
        self.tokenizer = byte_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        sampled_by = settings.get("sampling", "host")
        self.model = PausableModel(
            batch_size=slots,
            max_total_tokens=WINDOW,
            vocab_size=VOCABULARY,
            sampling=sampled_by,
            prefill_chunk=prefill_chunk,
            adapters=adapters,
            **({} if snapshots is None else REUSING | {"snapshots": snapshots}),
        )
        address = self.address = f"ipc://{folder}/worker.sock"
        self.metrics = Metrics("m")
        self.admission = Admission(LIMITS["max_concurrent_requests"])
        self.link = Link(address, self.metrics, self.admission)
        limits = (VOCABULARY, [EOS], 2, WINDOW - 1, WINDOW)
        info = info_of("m", None, str(folder), *limits, "fake", "float32", model_dir=str(folder), sampling=sampled_by)
        folders = {name: f"/adapters/{name}" for name in adapters}
        if snapshots is not None:
            info = msgspec.structs.replace(info, state_bytes=1)
        self.info = msgspec.structs.replace(info, prompt_logprobs=self.model.supports_prompt_logits, adapters=folders)
        self.read = []  # the adapters that were loaded: name, source
        self.worker = Worker(
            model=self.model,
            config=Config(),
            eos_token_ids=frozenset([EOS]),
            link=self.link,
            admission=self.admission,
            metrics=self.metrics,
            outputs=Publisher(self.link, self.metrics),
            grammars=grammars_for(self.tokenizer.to_str()),
            adapter_changes=AdapterChanges(self.model.adapters, self.read_adapter, self.link, Config()) if adapters else None,
        )
        self.config = Config(**LIMITS | settings)
        self.seen = EngineClient(address, lambda info: ModelText.load(info, self.config))
        self.store = folder / "responses"
        self.client = web.create_app(self.config, self.seen, self.store).test_client()
        self.thread = threading.Thread(target=self.worker.run, daemon=True)

    def read_adapter(self, name, source):
        self.read.append((name, source))
        if "damaged" in source:
            raise ModelError("on purpose")
        return ADAPTER

    def get_ready(self):
        compile_loops()
        self.link.announce(self.info)
        self.thread.start()
        wait_until(lambda: self.seen.phase == "ready")
        return self

    def post(self, route, body, **options):
        options.setdefault("content_type", "application/json")
        return self.client.post(route, data=body if isinstance(body, bytes) else json.dumps(body), **options)

    def expected(self, text, most, adapter=None):
        return greedy(self.tokenizer.encode(text).ids, most, VOCABULARY, self.model.adapters.numbers[adapter] if adapter else 0)

    def counts(self):
        """The samples of all series by their name and labels, without histograms' buckets and what all of vLLM's share."""
        text = self.client.get("/metrics").get_data(as_text=True)
        return {
            sample.name
            + "".join(f",{value}" for label, value in sample.labels.items() if label not in SHARED_LABELS): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    def wait_for_count(self, name, value):
        wait_until(lambda: self.counts()[name] == value)

    def assert_idle(self):
        wait_until(lambda: is_idle(self.worker) and not self.seen._queues)

    def close(self):
        self.model.may_decode.set()
        self.worker.stop()
        if self.thread.is_alive():
            self.thread.join(WAIT_S)
        self.link.close()
        self.seen.close()


def wait_until(holds, at_most_s=WAIT_S):
    """Lets the greenlets of the web side run meanwhile."""
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        gevent.sleep(0.01)


def events(response):
    text = response.get_data(as_text=True)
    assert text.endswith("\n\n")
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]
