"""The Prometheus registry of the whole server: metrics with TGI's names, types, labels and buckets, further
ones, and those of vLLM that gateways, dashboards and benchmarks read.

It lives in the worker. The output thread counts steps from `StepOutput`s. API server processes send
`RequestStats` for HTTP requests, and request the text when one of them is scraped. The socket's thread
handles both, so also during startup and while the device is busy; gauges are read from the worker then.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)

from config import VERSION
from engine.step import StepOutput
from protocol import RequestStats

METHODS = ("prefill", "decode")
FAILURES = ("overloaded", "validation", "incomplete", "template", "generation", "dropped")
HTTP_ERRORS = (400, 401, 404, 405, 408, 413, 414, 415, 422, 424, 429, 431, 500, 501, 503, 529)
SHED_REASONS = ("backpressure", "wait_exceeded")

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
    (Counter, "adapter_requests", "Requests that chose a LoRA adapter", "adapter", ()),
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
    (Counter, "batch_concat", "Prompts that joined a running batch", "reason", SHED_REASONS),
    (Histogram, "grammar_mask_duration", "Seconds of computing a step's token masks, while the device runs"),
    (Histogram, "grammar_compile_duration", "Seconds of compiling a grammar"),
    (Counter, "images", "Images in requests"),
    (Counter, "encoder_cache_hits", "Images whose embeddings were in the encoder cache"),
    (Gauge, "encoder_cache_bytes", "Bytes of image embeddings in the encoder cache"),
    (Histogram, "image_encode_duration", "Seconds of encoding an image"),
    (Gauge, "state_snapshots", "Snapshots of recurrent states that prompts can continue from"),
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
    (Gauge, "build_info", "1; the version of the server", "version", (VERSION,)),
)
# vLLM's names, types, labels and buckets, for tools that are made for it: the endpoint pickers of llm-d and
# the Gateway API Inference Extension, AIPerf, Grafana dashboards. Columns as above; names are whole.
VLLM_METRICS = (
    (Gauge, "vllm:num_requests_running", "Requests with a slot"),
    (Gauge, "vllm:num_requests_waiting", "Requests waiting for a slot"),
    (Gauge, "vllm:kv_cache_usage_perc", "Tokens that running requests hold, of all slots' tokens: 0 to 1"),
    (Counter, "vllm:prompt_tokens", "Prompt tokens that were prefilled or cached"),
    (Counter, "vllm:generation_tokens", "Generated tokens"),
    (Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    (Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    (
        Counter,
        "vllm:request_success",
        "Generation requests that succeeded",
        "finished_reason",
        ("stop", "length"),
    ),
    (Histogram, "vllm:time_to_first_token_seconds", "Seconds from a request's arrival to its first token"),
    (Histogram, "vllm:inter_token_latency_seconds", "Seconds between two steps with tokens of a sequence"),
    (Histogram, "vllm:e2e_request_latency_seconds", "Seconds from arrival to last token, on success"),
    (Histogram, "vllm:request_queue_time_seconds", "Seconds that a request waited for a slot, on success"),
    (Histogram, "vllm:request_prefill_time_seconds", "Seconds from slot to first token, on success"),
    (Histogram, "vllm:request_decode_time_seconds", "Seconds from first to last token, on success"),
)
MIN_BLOCK_SIZE = 16  # tokens; vLLM's default
VLLM_ENGINE = "0"  # the label `engine`: its number among the data-parallel engines of a server

DURATION_BUCKETS = list(itertools.accumulate([0.0001] + [1.5] * 35, operator.mul))[1:]
LONG_BUCKETS = [0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST_BUCKETS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60]
REQUEST_BUCKETS += [120, 240, 480, 960, 1920, 7680]
BUCKETS = {  # of histograms without DURATION_BUCKETS
    "batch_next_size": range(1, 1025),
    "vllm:time_to_first_token_seconds": (
        [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *LONG_BUCKETS, 160, 640, 2560]
    ),
    "vllm:inter_token_latency_seconds": (
        [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *LONG_BUCKETS]
    ),
    "vllm:e2e_request_latency_seconds": REQUEST_BUCKETS,
    "vllm:request_queue_time_seconds": REQUEST_BUCKETS,
    "vllm:request_prefill_time_seconds": REQUEST_BUCKETS,
    "vllm:request_decode_time_seconds": REQUEST_BUCKETS,
}
disable_created_metrics()  # times at which series began


class Metrics:
    """Everything that /metrics shows. May be used from any thread."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._load: Callable[[], Mapping[str, float]] = dict
        self._refresh_adapters: Callable[[], object] = dict
        self._tokens_at = 0.0  # when running requests last gained a token
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram | Summary] = {}
        for row in METRICS + VLLM_METRICS:
            self._add(*row)
        self.series("build_info", VERSION).set(1)
        ProcessCollector(registry=self._registry)  # of the worker

    def series(self, name: str, *label: str | int) -> Counter | Gauge | Histogram | Summary:
        """Returns the metric of this name, TGI's without "tgi_". label: the value of the metric's label, if
        the metric has one, which is shown from now on; vLLM's labels of the model and engine are added.
        Raises KeyError for a name that is not there, as those of `describe_model` before its call."""
        metric = self._metrics[name]
        if name.startswith("vllm:"):
            label = (self._model_name, VLLM_ENGINE, *label)
        return metric.labels(*label) if label else metric

    def describe_model(
        self,
        batch_size: int,
        max_input_tokens: int,
        max_total_tokens: int,
        cache_dtype: str,
        prefix_granularity: int | None,
    ) -> None:
        """Shows the limits of the model and its KV cache, and adds the histograms whose buckets depend on the
        limits: those of tokens, up to the longest prompt and context. To be called once. prefix_granularity:
        None without prefix caching.

        vLLM describes its KV cache in blocks, and endpoint pickers compare prompts block by block. So a block
        is the least that prefix caching reuses, and at least MIN_BLOCK_SIZE tokens: pickers give up on
        prompts of too many blocks.
        """
        cache_tokens = batch_size * max_total_tokens
        self.series("slots_total").set(batch_size)
        self.series("batch_max_total_tokens").set(cache_tokens)
        for name, about, longest in (
            ("request_input_length", "Tokens of a request's prompt", max_input_tokens),
            ("request_max_new_tokens", "Tokens that a request may generate", max_total_tokens),
            ("request_generated_tokens", "Tokens that a request generated, on success", max_total_tokens),
        ):
            self._add(Histogram, name, about, buckets=[longest / 100 * (i + 1) for i in range(100)])
        powers = range(len(str(max_total_tokens)))
        round_numbers = [digit * 10**power for power in powers for digit in (1, 2, 5)]
        buckets = [number for number in round_numbers if number <= max_total_tokens]
        for name, about in (
            ("prompt", "Tokens of a request's prompt, on success"),
            ("generation", "Tokens that a request generated, on success"),
            ("max_num_generation", "Tokens of a request's longest sequence, on success"),
        ):
            self._add(Histogram, f"vllm:request_{name}_tokens", about, buckets=buckets)
        block_size = max(MIN_BLOCK_SIZE, prefix_granularity or 0)
        labels = {
            "block_size": block_size,
            "num_gpu_blocks": cache_tokens // block_size,
            "cache_dtype": cache_dtype,
            "enable_prefix_caching": prefix_granularity is not None,
            "engine": VLLM_ENGINE,
        }
        info = Gauge("vllm:cache_config_info", "1; the KV cache", labels, registry=self._registry)
        info.labels(**labels).set(1)

    def watch(self, load: Callable[[], Mapping[str, float]]) -> None:
        """Shows what `load` returns from now on: the values of gauges by the names that `series` takes.
        `render` calls `load` on its caller's thread."""
        self._load = load

    def watch_adapters(self, slots: int, adapters: Callable[[], tuple[set[str], set[str]]]) -> None:
        """Shows the LoRA adapters that `adapters` returns from now on: the names for running and for waiting
        requests. `render` calls `adapters` on its caller's thread. To be called once.

        slots: how many adapters can run at a time. The gateways of Kubernetes' Inference Extension choose a
        replica by this metric of vLLM.
        """
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        about = "The LoRA adapters of running and waiting requests; the value is the time"
        gauge = Gauge("vllm:lora_requests_info", about, labels, registry=self._registry)

        def refresh() -> None:
            gauge.clear()
            of_state = (",".join(sorted(names)) for names in adapters())
            gauge.labels(slots, *of_state).set_to_current_time()

        self._refresh_adapters = refresh

    def record(self, stats: RequestStats) -> None:
        """Counts an HTTP request that has ended. One without an `outcome` (its route generates no text)
        counts only if it failed; a client disconnect (499) counts as such, not as an error."""
        if stats.status == 499:
            self.series("client_disconnects").inc()
        elif stats.status >= 400:
            self.series("http_errors", stats.status).inc()
        if stats.outcome is None:
            return
        values = {"request_count": 1}
        if stats.adapter:
            self.series("adapter_requests", stats.adapter).inc()
        if stats.first_token_s is not None:
            values["request_time_to_first_token_duration"] = stats.first_token_s
            values["vllm:time_to_first_token_seconds"] = stats.first_token_s
        if stats.input_tokens > 0:
            values["request_input_length"] = stats.input_tokens
            values["request_max_new_tokens"] = stats.max_new_tokens
        self._update(values)
        if stats.outcome == "success":
            self._count_success(stats)
        else:
            self.series("request_failure", stats.outcome).inc()

    def count_step(self, output: StepOutput) -> None:
        """Counts a step that has ended. Sets `last_token_at` of the requests that got tokens. Of a step that
        failed only the failure is counted. The output thread calls this method."""
        step = output.step
        # TGI's label; a step with rows of running requests is a decode step, whatever else it runs.
        method = "decode" if step.num_decodes else "prefill"
        if output.failure:
            self._update({"batch_inference_count": 1, "batch_inference_failure": 1}, method)
            return
        of_method = {
            "batch_inference_count": 1,
            "batch_inference_success": 1,
            "batch_inference_duration": output.sampled_at - output.started_at,
            "batch_forward_duration": output.ran_at - output.started_at,
            "batch_decode_duration": output.sampled_at - output.ran_at,
            "batch_filter_duration": output.done_at - output.sampled_at,
        }
        self._update(of_method, method)
        generated = sum(map(len, output.tokens))
        started = step.started
        cached = sum(request.cached for request in started)
        values = {
            "generated_tokens": generated,
            "vllm:generation_tokens": generated,
            "vllm:prompt_tokens": step.prompt_tokens + cached,
            "prefix_cache_tokens": cached,
            "vllm:prefix_cache_hits": cached,
            "vllm:prefix_cache_queries": sum(len(each.prompt) for each in started if not each.all_logits),
            "speculation_draft_tokens": sum(len(row.tokens) - 1 for row in step.chunks[: step.num_decodes]),
            # The first token of each chunk was sampled.
            "speculation_accepted_tokens": generated - sum(map(bool, output.tokens)),
        }
        if started:
            values["batch_next_size"] = len(started)
        if output.mask_s:
            values["grammar_mask_duration"] = output.mask_s
        if step.num_decodes:
            values["steps"] = 1
            values["inter_token_latency_duration"] = output.done_at - self._tokens_at
        self._update(values)
        if step.running:
            self._count_joining(output)
        if step.num_decodes or not step.running:  # no tokens come before the first ones
            self._tokens_at = output.done_at
        self._count_latencies(output)

    def _count_joining(self, output: StepOutput) -> None:
        """Counts the prompts that start while requests generate, and the time of a step in which only prompts
        run."""
        for request in output.step.started:
            reason = "wait_exceeded" if request.exceeded_wait else "backpressure"
            self.series("batch_concat", reason).inc()
        if not output.step.num_decodes:
            self.series("batch_concat_duration", "decode").observe(output.ran_at - output.started_at)

    def _count_latencies(self, output: StepOutput) -> None:
        """Observes the time between two steps with tokens of each sequence, as vLLM does; TGI's metric times
        the batch. Sets `last_token_at` of each request with tokens."""
        latency = self.series("vllm:inter_token_latency_seconds")
        for request, tokens in zip(output.step.requests, output.tokens):
            if not tokens:
                continue
            if request.last_token_at:
                latency.observe(output.done_at - request.last_token_at)
            request.last_token_at = output.done_at

    def _count_success(self, stats: RequestStats) -> None:
        """Counts an HTTP request that has succeeded."""
        self.series("vllm:request_success", stats.finish_reason).inc()
        values = {
            "request_success": 1,
            "request_duration": stats.duration_s,
            "request_validation_duration": stats.validation_s,
            "request_queue_duration": stats.queue_s,
            "request_inference_duration": stats.inference_s,
            "request_generated_tokens": stats.generated_tokens,
            "request_skipped_tokens": stats.accepted_draft_tokens,
            "vllm:e2e_request_latency_seconds": stats.duration_s,
            "vllm:request_queue_time_seconds": stats.queue_s,
            "vllm:request_prompt_tokens": stats.input_tokens,
            "vllm:request_generation_tokens": stats.generated_tokens,
            "vllm:request_max_num_generation_tokens": stats.longest_sequence,
        }
        if stats.generated_tokens:
            values["request_mean_time_per_token_duration"] = stats.inference_s / stats.generated_tokens
        if stats.first_token_s is not None:
            decode_s = stats.duration_s - stats.first_token_s
            values["vllm:request_prefill_time_seconds"] = max(0.0, stats.inference_s - decode_s)
            values["vllm:request_decode_time_seconds"] = decode_s
        self._update(values)

    def _update(self, values: Mapping[str, float], *label: str) -> None:
        """Adds each value to the counter of its name. A histogram or summary of that name observes the value
        instead. label: the value of the label that all these metrics have."""
        for name, value in values.items():
            series = self.series(name, *label)
            if isinstance(series, Counter):
                series.inc(value)
            else:
                series.observe(value)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format, in which TGI's counters do not end in `_total`.
        Reads the gauges first, by calling what `watch` and `watch_adapters` got."""
        for name, value in self._load().items():
            self.series(name).set(value)
        self._refresh_adapters()
        text = generate_latest(self._registry)
        for kind, name, *_ in METRICS:
            if kind is Counter:
                text = text.replace(f"tgi_{name}_total".encode(), f"tgi_{name}".encode())
        return text

    def _add(
        self,
        kind,
        name: str,
        about: str,
        label: str | None = None,
        values: Iterable = (),
        **options,
    ) -> None:
        """Registers a metric of the class `kind`. Histograms have DURATION_BUCKETS, unless BUCKETS or the
        options say otherwise.

        name: the name without "tgi_"; vLLM's names are whole, and get its labels of model and engine. about:
        the help. label: the name of its label. values: the label's values whose series are there from the
        start.
        """
        if kind is Histogram:
            options.setdefault("buckets", BUCKETS.get(name, DURATION_BUCKETS))
        labels = [label] if label else []
        full_name = f"tgi_{name}"
        if name.startswith("vllm:"):
            labels = ["model_name", "engine", *labels]
            full_name = name
        self._metrics[name] = kind(full_name, about, labels, registry=self._registry, **options)
        if not label:
            self.series(name)
        for value in values:  # a rate would miss the first event of a series that starts with it
            self.series(name, value)
