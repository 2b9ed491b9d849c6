"""The Prometheus registry of the whole server: TGI's metric names, types, labels and buckets, and further
metrics.

It lives in the worker. The output thread counts steps from `StepOutput`s. API server processes send
`RequestStats` for HTTP requests, and request the text when one of them is scraped. The socket's thread
handles both, so also during startup and while the device is busy; gauges are read from the worker then.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary
from prometheus_client.utils import floatToGoString

from config import VERSION
from engine.scheduler import Step
from engine.step import StepOutput
from protocol import RequestStats

METHODS = ("prefill", "decode")
FAILURES = ("overloaded", "validation", "incomplete", "template", "generation", "dropped")
HTTP_ERRORS = (400, 401, 404, 405, 408, 413, 414, 415, 422, 424, 429, 431, 500, 501, 503, 529)
REASONS = ("backpressure", "wait_exceeded")

# (class, name without "tgi_", help, label name, the label's values that are there from the start)
METRICS = (
    (Counter, "request_count", "Finished generation requests"),
    (Counter, "request_success", "Generation requests that succeeded"),
    (Counter, "request_failure", "Generation requests that failed, by reason", "err", FAILURES),
    (Histogram, "request_duration", "Seconds from a request's arrival to its last token, on success"),
    (Histogram, "request_validation_duration", "Seconds of validation and tokenization, on success"),
    (Histogram, "request_queue_duration", "Seconds that a request waited for a slot, on success"),
    (
        Histogram,
        "request_inference_duration",
        "Seconds from a request's prefill to its last token, on success",
    ),
    (
        Histogram,
        "request_mean_time_per_token_duration",
        "Seconds of inference per generated token, on success",
    ),
    (
        Histogram,
        "request_time_to_first_token_duration",
        "Seconds from a request's arrival to its first token",
    ),
    (
        Histogram,
        "inter_token_latency_duration",
        "Seconds between a decode step's tokens and the previous step's",
    ),
    (Summary, "request_skipped_tokens", "Accepted draft tokens of a request, on success"),
    (Counter, "speculation_draft_tokens", "Verified draft tokens"),
    (Counter, "speculation_accepted_tokens", "Accepted draft tokens"),
    (Gauge, "queue_size", "Requests waiting for a slot"),
    (Histogram, "batch_next_size", "Prompts that started in the same step"),
    (Gauge, "batch_current_size", "Requests in the running batch"),
    (Gauge, "batch_current_max_tokens", "Tokens that the running batch can grow to"),
    (Gauge, "batch_max_total_tokens", "Tokens that all slots together can hold"),
    (
        Counter,
        "batch_inference_count",
        "Steps; those with running requests are decode steps",
        "method",
        METHODS,
    ),
    (Counter, "batch_inference_success", "Steps that succeeded", "method", METHODS),
    (Counter, "batch_inference_failure", "Steps that failed on the device", "method", METHODS),
    (Histogram, "batch_inference_duration", "Seconds of a step, including sampling", "method", METHODS),
    (Histogram, "batch_forward_duration", "Seconds of a step on the device", "method", METHODS),
    (Histogram, "batch_decode_duration", "Seconds of sampling in a step", "method", METHODS),
    (Histogram, "batch_filter_duration", "Seconds of scheduling after a step", "method", METHODS),
    (
        Histogram,
        "batch_concat_duration",
        "Seconds that running requests waited for a prefill step",
        "method",
        ("decode",),
    ),
    (Counter, "batch_concat", "Prompts that joined a running batch", "reason", REASONS),
    (Histogram, "grammar_mask_duration", "Seconds of computing a step's token masks, while the device runs"),
    (Histogram, "grammar_compile_duration", "Seconds of compiling a grammar"),
    (Counter, "images", "Images in requests"),
    (Counter, "encoder_cache_hits", "Images whose embeddings were in the encoder cache"),
    (Gauge, "encoder_cache_bytes", "Bytes of image embeddings in the encoder cache"),
    (Histogram, "image_encode_duration", "Seconds of encoding an image"),
    (Counter, "prefix_cache_tokens", "Prompt tokens found in the prefix cache"),
    (Gauge, "ready", "1 while new requests are accepted, else 0"),
    (Gauge, "slots_busy", "Occupied slots"),
    (Gauge, "slots_total", "Slots"),
    (Gauge, "startup_phase_seconds", "Seconds of a startup phase", "phase", ()),
    (Gauge, "last_step_age_seconds", "Seconds since the device finished a step; 0 while idle"),
    (Counter, "steps", "Decode steps"),
    (Counter, "generated_tokens", "Generated tokens"),
    (
        Counter,
        "http_errors",
        "HTTP responses with a status of 400 or more, without client disconnects",
        "status",
        HTTP_ERRORS,
    ),
    (Counter, "client_disconnects", "Requests whose client disconnected before the end"),
)
DURATION_BUCKETS = list(itertools.accumulate([0.0001] + [1.5] * 35, operator.mul))[1:]


class Metrics:
    """Everything that /metrics shows. May be used from any thread."""

    def __init__(self):
        self._load: Callable[[], Mapping[str, float]] = dict
        self._tokens_at = 0.0  # when running requests last gained a token
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram | Summary] = {}
        for kind, name, about, *label in METRICS:
            self._add(kind, name, about, *label)
        self._add(Gauge, "build_info", "1; the version of the server", "version", (VERSION,))
        self.series("build_info", VERSION).set(1)
        ProcessCollector(registry=self._registry)  # of the worker

    def series(self, name: str, *label: str | int) -> Counter | Gauge | Histogram | Summary:
        """One metric by its name without "tgi_", with the value of its label if it has one."""
        metric = self._metrics[name]
        return metric.labels(*label) if label else metric

    def set_limits(self, batch_size: int, max_input_tokens: int, max_total_tokens: int) -> None:
        """Sets the limits and adds the metrics that depend on them. `batch_size` may be 0 until the model has
        decided it."""
        self.series("slots_total").set(batch_size)
        self.series("batch_max_total_tokens").set(batch_size * max_total_tokens)
        if "request_input_length" in self._metrics:
            return
        for name, about, longest in (
            ("request_input_length", "Tokens of a request's prompt", max_input_tokens),
            ("request_max_new_tokens", "Tokens that a request may generate", max_total_tokens),
            ("request_generated_tokens", "Tokens that a request generated, on success", max_total_tokens),
        ):
            self._add(Histogram, name, about, buckets=[longest / 100 * (i + 1) for i in range(100)])

    def watch(self, load: Callable[[], Mapping[str, float]]) -> None:
        """Shows from now on what `load` returns: values of gauges by their names without "tgi_", as they are
        when the metrics are rendered, on that thread."""
        self._load = load

    def record(self, stats: RequestStats) -> None:
        """Counts an HTTP request that has ended."""
        if stats.status == 499:
            self.series("client_disconnects").inc()
        elif stats.status >= 400:
            self.series("http_errors", stats.status).inc()
        if stats.outcome is None:
            return
        self.series("request_count").inc()
        if stats.first_token_s is not None:
            self.series("request_time_to_first_token_duration").observe(stats.first_token_s)
        if stats.input_tokens > 0:
            self.series("request_input_length").observe(stats.input_tokens)
            self.series("request_max_new_tokens").observe(stats.max_new_tokens)
        if stats.outcome == "success":
            self._count_success(stats)
        else:
            self.series("request_failure", stats.outcome).inc()

    def count_step(self, output: StepOutput) -> None:
        step = output.step
        # TGI's label; a step with rows of running requests is a decode step, whatever else it runs.
        method = "decode" if step.num_decodes else "prefill"
        self.series("batch_inference_count", method).inc()
        if output.failure:
            self.series("batch_inference_failure", method).inc()
            return
        self.series("batch_inference_success", method).inc()
        self.series("batch_inference_duration", method).observe(output.sampled_at - output.started_at)
        self.series("batch_forward_duration", method).observe(output.ran_at - output.started_at)
        self.series("batch_decode_duration", method).observe(output.sampled_at - output.ran_at)
        self.series("batch_filter_duration", method).observe(output.done_at - output.sampled_at)
        self.series("generated_tokens").inc(sum(map(len, output.tokens)))
        self.series("speculation_draft_tokens").inc(output.draft_tokens)
        self.series("speculation_accepted_tokens").inc(output.accepted)
        if output.mask_s is not None:
            self.series("grammar_mask_duration").observe(output.mask_s)
        if step.num_decodes:
            self.series("steps").inc()
            self.series("inter_token_latency_duration").observe(output.done_at - self._tokens_at)
        elif step.running:
            self.series("batch_concat_duration", "decode").observe(output.ran_at - output.started_at)
        if step.num_decodes or not step.running:  # no tokens come before the first ones
            self._tokens_at = output.done_at
        self._count_prompts(step)

    def _count_prompts(self, step: Step) -> None:
        started = step.started
        if not started:
            return
        self.series("prefix_cache_tokens").inc(sum(request.cached for request in started))
        self.series("batch_next_size").observe(len(started))
        if step.running:
            for request in started:
                reason = "wait_exceeded" if request.exceeded_wait else "backpressure"
                self.series("batch_concat", reason).inc()

    def _count_success(self, stats: RequestStats) -> None:
        self.series("request_success").inc()
        self.series("request_duration").observe(stats.duration_s)
        self.series("request_validation_duration").observe(stats.validation_s)
        self.series("request_queue_duration").observe(stats.queue_s)
        self.series("request_inference_duration").observe(stats.inference_s)
        self.series("request_generated_tokens").observe(stats.generated_tokens)
        self.series("request_skipped_tokens").observe(stats.accepted_draft_tokens)
        if stats.generated_tokens:
            seconds = stats.inference_s / stats.generated_tokens
            self.series("request_mean_time_per_token_duration").observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text format. Not prometheus_client's, because TGI's counters do not end in `_total`."""
        for name, value in self._load().items():
            self.series(name).set(value)
        lines = []
        for metric in self._registry.collect():
            is_ours = metric.name.startswith("tgi_")
            shown = metric.name if is_ours or metric.type != "counter" else f"{metric.name}_total"
            lines += [f"# HELP {shown} {metric.documentation}", f"# TYPE {shown} {metric.type}"]
            for point in metric.samples:
                if point.name.endswith("_created"):
                    continue
                is_counter = metric.type == "counter" and is_ours
                name = point.name.removesuffix("_total") if is_counter else point.name
                labels = ",".join(f'{key}="{value}"' for key, value in point.labels.items())
                braces = f"{{{labels}}}" if labels else ""
                lines.append(f"{name}{braces} {floatToGoString(point.value)}")
        return "".join(f"{line}\n" for line in lines).encode()

    def _add(
        self,
        kind,
        name: str,
        about: str,
        label: str | None = None,
        values: Iterable = (),
        **options,
    ) -> None:
        if kind is Histogram and "buckets" not in options:
            options["buckets"] = range(1, 1025) if name == "batch_next_size" else DURATION_BUCKETS
        labels = [label] if label else []
        self._metrics[name] = metric = kind(f"tgi_{name}", about, labels, registry=self._registry, **options)
        for value in values:  # a rate would miss the first event of a series that starts with it
            metric.labels(value)
