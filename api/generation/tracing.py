"""OpenTelemetry traces of generation requests, sent to a collector by OTLP over HTTP, in JSON
(`--otlp-endpoint`).

A request is a span of kind SERVER, the child of the span that its `traceparent` header names. The spans of
its stages are made when it ends, from times that the API server measured: validate; queue, prefill and
decode of each sequence; stream. The packages of the extra `otel` are imported nowhere else, and only when a
`Tracer` is made. Independent of Flask.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gevent

from api.generation.response_writer import GeneratedSequence
from config import VERSION
from protocol import RequestStats
from run import ConfigError

SERVICE_NAME = "text-generation-inference.router"  # TGI's
BATCH = 64  # spans that are encoded at a time, which holds up the event loop for 3 ms
FLUSH_S = 2.0  # a stopping server waits no longer for its collector
FAULTS = ("generation", "incomplete")  # outcomes that are errors of the server


def check_installed() -> None:
    """Raises ConfigError if no package of OpenTelemetry is installed. Whether all that a `Tracer` needs are
    is not checked."""
    if not importlib.util.find_spec("opentelemetry"):
        raise ConfigError(
            '--otlp-endpoint (OTLP_ENDPOINT) needs the packages of OpenTelemetry: pip install ".[otel]"'
        )


class Tracer:
    """Exports spans every few seconds, and when the process ends, which then waits up to FLUSH_S for the
    collector. To be made when gevent has patched the process: the exporter's thread is then a greenlet.
    OpenTelemetry's own variables (`OTEL_TRACES_SAMPLER`, …) are read. Raises ImportError without the
    packages. endpoint: the URL that gets the spans by POST."""

    def __init__(self, endpoint: str):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME
        resource = Resource.create({"service.name": name, "service.version": VERSION})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint), max_export_batch_size=BATCH)
        )
        self.api = trace
        self.parent_of = TraceContextTextMapPropagator().extract
        self.start_span = provider.get_tracer("neuron-textgen", VERSION).start_span
        self._provider = provider
        atexit.register(self._close)

    def _close(self) -> None:
        with gevent.Timeout(FLUSH_S, False):
            self._provider.shutdown()


class RequestTrace:
    """The span of a request, with the name `route`. The constructor begins it; `end` ends it, and adds the
    spans of its stages. Times are CLOCK_MONOTONIC, in seconds.

    headers: those of the request; `traceparent` names the parent span. started_at: when the request arrived.
    """

    def __init__(
        self,
        tracer: Tracer,
        route: str,
        headers: Mapping[str, str],
        request_id: str,
        started_at: float,
    ):
        self._tracer = tracer
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._started_at = started_at
        self._span = tracer.start_span(
            route,
            tracer.parent_of(headers),
            tracer.api.SpanKind.SERVER,
            {"request_id": request_id},
            start_time=self._ns(started_at),
        )
        self._context = tracer.api.set_span_in_context(self._span)

    def end(
        self,
        stats: RequestStats,
        model_name: str = "",
        sequences: Sequence[GeneratedSequence] = (),
        streams_at: float | None = None,
    ) -> None:
        """Ends the span, with the status, the outcome and the token counts of the request, and adds the spans
        of its stages. To be called once. Does not wait for the collector.

        model_name: that of the model, or of the LoRA adapter. sequences: none for a request that was not sent
        to the worker, whose only stage is `validate`. streams_at: when the stream began; None: no stream did.
        """
        now = time.monotonic()
        sent_at = self._started_at + stats.validation_s if sequences else now
        self._span.set_attribute("http.response.status_code", stats.status)
        if stats.outcome != "success":
            self._span.set_attribute("error.type", str(stats.outcome))
        self._stage("validate", self._started_at, sent_at)
        for sequence in sequences:
            self._add_stages(sequence, sent_at, now)
        if streams_at is not None:
            self._stage("stream", streams_at, now)
        if sequences:
            attributes = {
                "gen_ai.response.model": model_name,
                "gen_ai.response.finish_reasons": [each.finish_reason or "error" for each in sequences],
                "gen_ai.request.max_tokens": stats.max_new_tokens,
                "gen_ai.usage.input_tokens": stats.input_tokens,
                "gen_ai.usage.output_tokens": stats.generated_tokens,
            }
            self._span.set_attributes(attributes)
        if stats.outcome in FAULTS:
            self._span.set_status(self._tracer.api.StatusCode.ERROR)
        self._span.end(self._ns(now))

    def _add_stages(self, sequence: GeneratedSequence, sent_at: float, now: float) -> None:
        """Adds the spans queue, prefill and decode of a sequence. A sequence without a first token gets none,
        because the worker sends the time in the queue with that token. sent_at: when the request was sent to
        the worker. now: where decode ends if the sequence has not finished."""
        if sequence.first_token_at is None:
            return
        index = {"sequence": sequence.index}
        cached = {"cached_tokens": sequence.prompt_done.cached}
        queued_until = sent_at + sequence.prompt_done.queued_s
        self._stage("queue", sent_at, queued_until, index)
        self._stage("prefill", queued_until, sequence.first_token_at, index | cached)
        self._stage("decode", sequence.first_token_at, sequence.finished_at or now, index)

    def _stage(
        self, name: str, begins_at: float, ends_at: float, attributes: dict[str, Any] | None = None
    ) -> None:
        """Adds a child span of this name, which begins and ends at these times."""
        start = self._ns(begins_at)
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start)
        span.end(self._ns(ends_at))

    def _ns(self, at: float) -> int:
        """Returns a time of CLOCK_MONOTONIC, in seconds, as nanoseconds since 1970."""
        return self._clock_ns + int(at * 1e9)
