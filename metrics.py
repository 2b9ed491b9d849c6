"""What Prometheus is told: one registry for the whole server, with TGI's names, types, labels and buckets, and ours.

It lives in the worker. The worker writes what its loop does; web processes send what they know of HTTP requests, and ask for
the text when somebody scrapes one of them. That is handled on the socket's thread (`Metrics.aside`), so that it works during
boot and while the device is busy.
"""

from __future__ import annotations

import itertools
import operator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.utils import floatToGoString

from protocol import Answered, AskMetrics, FromWeb
from protocol import Metrics as MetricsText

METHODS = ("prefill", "decode")
FAILURES = ("overloaded", "validation", "incomplete", "template", "generation", "dropped")
HTTP_ERRORS = ("400", "401", "404", "405", "408", "413", "414", "415", "422", "424", "429", "431", "500", "501", "503")
REASONS = ("backpressure", "wait_exceeded")

# (class, name without "tgi_", help, label name, the label's values that are there from the start)
METRICS = (
    (Counter, "request_count", "Requests for text that are over"),
    (Counter, "request_success", "Requests for text that ended well"),
    (Counter, "request_failure", "Requests for text that did not end well, by reason", "err", FAILURES),
    (Histogram, "request_duration", "Seconds from a request's arrival to its last token, on success"),
    (Histogram, "request_validation_duration", "Seconds that checking and tokenizing a request took, on success"),
    (Histogram, "request_queue_duration", "Seconds that a request waited for a slot, on success"),
    (Histogram, "request_inference_duration", "Seconds from a request's prefill to its last token, on success"),
    (Histogram, "request_mean_time_per_token_duration", "Seconds of inference per generated token, on success"),
    (Histogram, "request_time_to_first_token_duration", "Seconds from a request's arrival to its first token"),
    (Histogram, "inter_token_latency_duration", "Seconds between a step's tokens and those that went out before them"),
    (Summary, "request_skipped_tokens", "Tokens that speculation skipped: always 0, there is no speculation"),
    (Gauge, "queue_size", "Requests that wait for a slot"),
    (Histogram, "batch_next_size", "Prompts that were prefilled together"),
    (Gauge, "batch_current_size", "Requests in the running batch"),
    (Gauge, "batch_current_max_tokens", "Tokens that the running batch can grow to"),
    (Gauge, "batch_max_total_tokens", "Tokens that all slots together can hold"),
    (Counter, "batch_inference_count", "Prefills or steps that were begun", "method", METHODS),
    (Counter, "batch_inference_success", "Prefills or steps that the device finished", "method", METHODS),
    (Counter, "batch_inference_failure", "Prefills or steps that failed on the device", "method", METHODS),
    (Histogram, "batch_inference_duration", "Seconds of a prefill or step, with the choice of its tokens", "method", METHODS),
    (Histogram, "batch_forward_duration", "Seconds of a prefill or step on the device", "method", METHODS),
    (Histogram, "batch_decode_duration", "Seconds that choosing the tokens of a prefill or step took", "method", METHODS),
    (Histogram, "batch_filter_duration", "Seconds that handing out tokens and freeing slots took", "method", METHODS),
    (Histogram, "batch_concat_duration", "Seconds that running requests waited for a prompt to join", "method", ("decode",)),
    (Counter, "batch_concat", "Prompts that joined a running batch", "reason", REASONS),
    (Gauge, "slots_busy", "Slots that a request runs in"),
    (Gauge, "slots_total", "Slots"),
    (Gauge, "boot_phase_seconds", "Seconds that a phase of the boot took", "phase", ()),
    (Gauge, "last_step_age_seconds", "Seconds since the device finished a prefill or step; 0 while no request runs"),
    (Counter, "steps", "Decode steps"),
    (Counter, "generated_tokens", "Generated tokens"),
    (Counter, "generated_tokens_in_full", "Generated tokens that only a computation over the whole vocabulary could tell"),
    (Counter, "http_errors", "HTTP answers with a status of 400 or more, hang-ups apart", "status", HTTP_ERRORS),
    (Counter, "client_hang_ups", "Requests whose client did not wait for the end"),
)
DURATION_BUCKETS = list(itertools.accumulate([0.0001] + [1.5] * 35, operator.mul))[1:]


class Metrics:
    """All that /metrics shows: TGI's names and buckets, and some of ours. May be used from any thread."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram | Summary] = {}
        for kind, name, about, *label in METRICS:
            self._add(kind, name, about, *label)

    def series(self, name: str, *label: str) -> Counter | Gauge | Histogram | Summary:
        """One metric by its name without "tgi_", with the value of its label if it has one."""
        metric = self._metrics[name]
        return metric.labels(*label) if label else metric

    def set_limits(self, batch_size: int, max_input_tokens: int, max_total_tokens: int) -> None:
        """Tells the limits and adds what depends on them. `batch_size` may be 0 until the model has decided it."""
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

    def aside(self, message: FromWeb) -> MetricsText | None:
        """Handles what the web processes have to say about metrics; the answer goes back to who asked."""
        if isinstance(message, AskMetrics):
            return MetricsText(message.id, self.render())
        if isinstance(message, Answered):
            self._count_answered(message)
        return None

    def step(self, method: str, started_at: float, ran_at: float, chosen_at: float, done_at: float) -> None:
        """A prefill or step went well: begun, run on the device, its tokens chosen, and handed out, at these times."""
        self.series("batch_inference_success", method).inc()
        self.series("batch_inference_duration", method).observe(chosen_at - started_at)
        self.series("batch_forward_duration", method).observe(ran_at - started_at)
        self.series("batch_decode_duration", method).observe(chosen_at - ran_at)
        self.series("batch_filter_duration", method).observe(done_at - chosen_at)

    def render(self) -> bytes:
        """Prometheus' text format. Not the library's own, because TGI's counters do not end in `_total`."""
        lines = []
        for metric in self._registry.collect():
            about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric.name} {about}", f"# TYPE {metric.name} {metric.type}"]
            for point in metric.samples:
                if point.name.endswith("_created"):
                    continue
                name = point.name.removesuffix("_total") if metric.type == "counter" else point.name
                labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in point.labels.items())
                braces = f"{{{labels}}}" if labels else ""
                lines.append(f"{name}{braces} {floatToGoString(point.value)}")
        return "".join(f"{line}\n" for line in lines).encode()

    def _add(self, kind, name: str, about: str, label: str | None = None, values: tuple[str, ...] = (), **options) -> None:
        if kind is Histogram and "buckets" not in options:
            options["buckets"] = range(1, 1025) if name == "batch_next_size" else DURATION_BUCKETS
        labels = [label] if label else []
        self._metrics[name] = metric = kind(f"tgi_{name}", about, labels, registry=self._registry, **options)
        for value in values:  # a rate would miss the first event of a series that comes with it
            metric.labels(value)

    def _count_answered(self, answered: Answered) -> None:
        if answered.status == 499:
            self.series("client_hang_ups").inc(answered.times)
        elif answered.status >= 400:
            self.series("http_errors", str(answered.status)).inc(answered.times)
        if answered.outcome is None:
            return
        self.series("request_count").inc(answered.times)
        if answered.first_token_s is not None:
            self.series("request_time_to_first_token_duration").observe(answered.first_token_s)
        if answered.input_tokens > 0:
            self.series("request_input_length").observe(answered.input_tokens)
            self.series("request_max_new_tokens").observe(answered.max_new_tokens)
        if answered.outcome != "success":
            err = answered.outcome if answered.outcome in FAILURES else "generation"
            self.series("request_failure", err).inc(answered.times)
            return
        self.series("request_success").inc()
        self.series("request_duration").observe(answered.duration_s)
        self.series("request_validation_duration").observe(answered.validation_s)
        self.series("request_queue_duration").observe(answered.queue_s)
        self.series("request_inference_duration").observe(answered.inference_s)
        self.series("request_generated_tokens").observe(answered.generated_tokens)
        if answered.generated_tokens:
            per_token_s = answered.inference_s / answered.generated_tokens
            self.series("request_mean_time_per_token_duration").observe(per_token_s)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
