"""What /metrics shows: TGI's and vLLM's names, types and buckets; each request and each step counted once, with its times."""

import random
import shutil
import subprocess
import threading

import msgspec
import pytest
from fakes.model import EOS, greedy
from grammars import grammars_of
from loop import Driven, Wire, on_every_engine
from peer import Peer
from prometheus_client.parser import text_string_to_metric_families
from tiny_tokenizers import byte_level

import worker
from config import VERSION, Config
from engine.admission import Admission
from engine.link import Link, PeerLost
from engine.metrics import Metrics
from protocol import (
    Cancel,
    Generate,
    MetricsRequest,
    MetricsText,
    RequestStats,
    SamplingParams,
    SubmitRequests,
    Tokens,
)
from text.grammar import of_regex

WAIT_S = 60
LASTING = next([a, 9] for a in range(50) if EOS not in greedy([a, 9], 30))  # a prompt whose text has no EOS token


class Clock:
    now = 100.0

    def pass_s(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock.now)
    return clock


def samples(metrics, prefix="tgi_"):
    """(name, labels) → value, as Prometheus' own parser reads it; counters by the name they are written with."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(prefix)]
    found = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            key = (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def types(metrics):
    lines = metrics.render().decode().splitlines()
    return dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))


def bounds(found, name):
    """The upper bounds of a histogram's buckets, the same for each label."""
    return list(dict.fromkeys(float(key[1].removeprefix("le=")) for key in found if key[0] == f"{name}_bucket"))


def with_limits():
    metrics = Metrics("")
    metrics.describe_model(4, 200, 400, "float32", None)
    return metrics


TGI = {
    "counter": "request_count request_success request_failure batch_inference_count batch_inference_success "
    "batch_inference_failure batch_concat",
    "gauge": "queue_size batch_current_size batch_current_max_tokens batch_max_total_tokens",
    "summary": "request_skipped_tokens",
    "histogram": "request_duration request_validation_duration request_queue_duration request_inference_duration "
    "request_mean_time_per_token_duration request_generated_tokens request_input_length request_max_new_tokens "
    "batch_next_size batch_inference_duration batch_forward_duration batch_decode_duration batch_filter_duration "
    "batch_concat_duration",
}


def test_the_metrics_of_tgi_are_there_by_name_and_type():
    found = types(with_limits())
    expected = {f"tgi_{name}": kind for kind, names in TGI.items() for name in names.split()}
    assert expected.items() <= found.items()
    assert all(name.startswith(("tgi_", "vllm:", "process_")) for name in found)


def test_the_version_and_the_process_are_there_under_prometheus_own_names():
    ours, found = samples(Metrics("")), samples(Metrics(""), "process_")
    assert ours["tgi_build_info", f"version={VERSION}"] == 1
    assert ours["tgi_ready",] == 0, "until the worker says so"
    assert found["process_cpu_seconds_total",] > 0 and found["process_resident_memory_bytes",] > 1e6


def test_the_text_is_what_prometheus_reads():
    metrics = with_limits()
    families = list(text_string_to_metric_families(metrics.render().decode()))
    shown = {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in types(metrics).items()}
    assert {family.name: family.type for family in families} == shown
    assert all(family.documentation for family in families)


def test_every_series_is_there_from_the_start_and_counters_have_no_suffix():
    found = samples(with_limits())
    for err in ("overloaded", "validation", "incomplete", "template", "generation", "dropped"):
        assert found["tgi_request_failure", f"err={err}"] == 0
    for method in ("prefill", "decode"):
        for name in ("inference_count", "inference_success", "inference_failure", "forward_duration_count"):
            assert found[f"tgi_batch_{name}", f"method={method}"] == 0
    for reason in ("backpressure", "wait_exceeded"):
        assert found["tgi_batch_concat", f"reason={reason}"] == 0
    assert found["tgi_request_count",] == found["tgi_steps",] == found["tgi_request_skipped_tokens_sum",] == 0
    set_at_once = ("tgi_slots_total", "tgi_batch_max_total_tokens", "tgi_build_info")
    assert {value for key, value in found.items() if key[0] not in set_at_once} == {0}
    assert (found["tgi_slots_total",], found["tgi_batch_max_total_tokens",]) == (4, 1600)
    suffixed = {key[0] for key in found if key[0].endswith(("_total", "_created"))}
    assert suffixed == {"tgi_slots_total"}


def test_buckets_are_tgis():
    metrics = with_limits()
    found = samples(metrics)
    infinity = [float("inf")]
    durations = [0.0001 * 1.5**k for k in range(1, 36)]
    for name in [name for name in types(metrics) if name.endswith("duration")]:
        assert bounds(found, name) == pytest.approx(durations + infinity)
    assert ("tgi_batch_forward_duration_bucket", "le=0.00015000000000000001", "method=decode") in found
    assert bounds(found, "tgi_batch_next_size") == [*range(1, 1025), *infinity]
    assert bounds(found, "tgi_request_input_length") == pytest.approx([2 * n for n in range(1, 101)] + infinity)
    for name in ("tgi_request_generated_tokens", "tgi_request_max_new_tokens"):
        assert bounds(found, name) == pytest.approx([4 * n for n in range(1, 101)] + infinity)


def test_before_the_model_is_loaded_everything_else_is_there():
    missing = set(types(with_limits())) - set(types(Metrics("")))
    of_tgi = {f"tgi_request_{name}" for name in ("input_length", "generated_tokens", "max_new_tokens")}
    of_vllm = {f"vllm:request_{name}_tokens" for name in ("prompt", "generation", "max_num_generation")}
    assert missing == of_tgi | of_vllm | {"vllm:cache_config_info"}


SUCCESS = RequestStats(
    status=200,
    outcome="success",
    duration_s=4.0,
    validation_s=0.25,
    queue_s=0.5,
    inference_s=3.0,
    first_token_s=1.0,
    input_tokens=10,
    generated_tokens=6,
    accepted_draft_tokens=2,
    max_new_tokens=20,
    longest_sequence=4,
    finish_reason="length",
)


def changed(metrics, *stats):
    """The series that these messages change, buckets apart → by how much."""
    before = samples(metrics)
    for message in stats:
        metrics.record(message)
    after = samples(metrics)
    names = [key for key in after if "_bucket" not in key[0] and after[key] != before.get(key, 0)]
    return {" ".join(key).removeprefix("tgi_"): after[key] - before.get(key, 0) for key in names}


def test_a_request_that_ends_well_is_counted_once_with_all_its_times():
    assert changed(with_limits(), SUCCESS) == {
        "request_count": 1,
        "request_success": 1,
        "request_duration_count": 1,
        "request_duration_sum": 4.0,
        "request_validation_duration_count": 1,
        "request_validation_duration_sum": 0.25,
        "request_queue_duration_count": 1,
        "request_queue_duration_sum": 0.5,
        "request_inference_duration_count": 1,
        "request_inference_duration_sum": 3.0,
        "request_mean_time_per_token_duration_count": 1,
        "request_mean_time_per_token_duration_sum": 0.5,
        "request_time_to_first_token_duration_count": 1,
        "request_time_to_first_token_duration_sum": 1.0,
        "request_generated_tokens_count": 1,
        "request_generated_tokens_sum": 6,
        "request_skipped_tokens_count": 1,
        "request_skipped_tokens_sum": 2,
        "request_input_length_count": 1,
        "request_input_length_sum": 10,
        "request_max_new_tokens_count": 1,
        "request_max_new_tokens_sum": 20,
    }


def test_a_success_without_a_token_divides_by_nothing():
    found = changed(with_limits(), RequestStats(200, "success"))
    assert found["request_success"] == 1
    assert "request_mean_time_per_token_duration_count" not in found


@pytest.mark.parametrize(
    ("stats", "found"),
    [
        (
            RequestStats(422, "validation"),
            {"request_count": 1, "request_failure err=validation": 1, "http_errors status=422": 1},
        ),
        (RequestStats(500, "template"), {"request_count": 1, "request_failure err=template": 1, "http_errors status=500": 1}),
        (RequestStats(499, "dropped"), {"request_count": 1, "request_failure err=dropped": 1, "client_disconnects": 1}),
        (RequestStats(0, "dropped"), {"request_count": 1, "request_failure err=dropped": 1}),
        (RequestStats(404), {"http_errors status=404": 1}),
        (RequestStats(418), {"http_errors status=418": 1}),
        (RequestStats(200), {}),
    ],
    ids=str,
)
def test_what_does_not_end_well_is_counted_by_its_reason(stats, found):
    assert changed(with_limits(), stats) == found


def test_a_refused_request_counts_its_prompt_where_it_was_counted():
    found = changed(with_limits(), RequestStats(429, "overloaded", input_tokens=10, max_new_tokens=20))
    assert (found["request_input_length_sum"], found["request_max_new_tokens_sum"]) == (10, 20)
    assert "request_duration_count" not in found


def test_a_request_whose_web_process_is_gone_counts_as_dropped_once():
    driven = Driven()
    driven.arrive(SubmitRequests([Generate(1, [1, 2], 8), Generate(2, [1, 2], 8)]), peer=b"gone")
    driven.arrive(Generate(3, [3, 4], 2), peer=b"here")
    driven.step()
    driven.arrive(PeerLost(), peer=b"gone")
    driven.run()
    found = samples(driven.worker.metrics)
    assert found["tgi_request_count",] == found["tgi_request_failure", "err=dropped"] == 1
    assert found["tgi_client_disconnects",] == 0, "no client disconnected"


def test_steps_and_their_failures_are_counted_and_timed_by_what_they_do():
    driven, decodes = Driven(batch_size=2, max_batch_prefill_tokens=1), []
    driven.each_call(lambda chunks: decodes.append(chunks[0].begin >= len(LASTING)))
    driven.arrive(*(Generate(i, LASTING, 4) for i in range(3)))
    driven.run()  # two start one after the other, the third when the first has ended, beside the second
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.arrive(Generate(3, LASTING, 4))
    driven.run()
    driven.arrive(Generate(4, LASTING, 4))
    driven.step()
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.run()
    found = samples(driven.worker.metrics)
    steps = sum(decodes) - 1  # one failed
    by_method = {
        (name, method): found[f"tgi_batch_inference_{name}", f"method={method}"]
        for name in ("count", "success", "failure")
        for method in ("prefill", "decode")
    }
    assert by_method == {
        ("count", "prefill"): 5,
        ("count", "decode"): steps + 1,
        ("success", "prefill"): 4,
        ("success", "decode"): steps,
        ("failure", "prefill"): 1,
        ("failure", "decode"): 1,
    }
    for name in ("inference", "forward", "decode", "filter"):
        assert found[f"tgi_batch_{name}_duration_count", "method=prefill"] == 4
        assert found[f"tgi_batch_{name}_duration_count", "method=decode"] == steps
    assert found["tgi_batch_concat", "reason=backpressure"] == 2
    assert found["tgi_batch_concat_duration_count", "method=decode"] == 2
    assert found["tgi_batch_next_size_sum",] == found["tgi_batch_next_size_count",] == 4
    assert found["tgi_steps",] == found["tgi_inter_token_latency_duration_count",] == steps > 0
    assert found["tgi_generated_tokens",] == 3 * 4 + 1


def test_draft_tokens_behind_the_end_of_a_text_do_not_count_as_accepted():
    prompt = next([a, b] for a in range(50) for b in range(50) if len(greedy([a, b], 4)) == 3)
    text = greedy(prompt, 4)
    driven = Driven(verify_length=8)
    beyond = greedy([*prompt, *text], 3)
    driven.arrive(Generate(1, prompt, 9, prediction=[*text, *beyond]))
    driven.run()
    assert driven.tokens[1] == text and driven.ends == {1: "eos_token"}
    found = samples(driven.worker.metrics)
    assert found["tgi_speculation_draft_tokens",] == 4
    assert found["tgi_speculation_accepted_tokens",] == 1, "the third token took no step of its own"


def test_a_step_with_prompts_and_running_requests_is_a_decode_step():
    driven = Driven(supports_chunked_prefill=True)
    driven.arrive(Generate(1, LASTING, 9))
    driven.step()
    driven.arrive(Generate(2, LASTING, 9), Generate(3, LASTING, 9))
    driven.step()
    found = samples(driven.worker.metrics)
    assert [found["tgi_batch_inference_count", f"method={name}"] for name in ("prefill", "decode")] == [1, 1]
    assert (found["tgi_batch_next_size_sum",], found["tgi_batch_next_size_count",]) == (3, 2)
    assert found["tgi_batch_concat", "reason=backpressure"] == 2
    assert found["tgi_generated_tokens",] == 4


def test_a_prompt_that_starts_because_max_waiting_tokens_have_passed_is_counted_as_wait_exceeded():
    driven = Driven(batch_size=6, waiting_served_ratio=1.0, max_waiting_tokens=3)
    driven.arrive(Generate(1, LASTING, 20), Generate(2, LASTING, 20))
    driven.step(2)
    driven.arrive(Generate(3, LASTING, 20))
    driven.step(4)  # one waiting request for two running ones
    driven.arrive(*(Generate(i, LASTING, 2) for i in (4, 5, 6)))
    driven.run()
    found = samples(driven.worker.metrics)
    counted = {reason: found["tgi_batch_concat", f"reason={reason}"] for reason in ("wait_exceeded", "backpressure")}
    assert counted == {"wait_exceeded": 1, "backpressure": 4}


def test_the_time_between_tokens_includes_prompts_that_run_between_and_no_time_when_nothing_ran(clock):
    driven = Driven()
    driven.each_call(lambda chunks: clock.pass_s(2.0 if chunks[0].begin == 0 else 0.5))
    driven.arrive(Generate(1, LASTING, 9), Generate(2, LASTING, 9))
    driven.step()  # 2 s until a first token, which follows none
    driven.step(3)  # 2 s for the second prompt, then two steps of 0.5 s
    driven.arrive(Generate(3, LASTING, 2))
    driven.step(2)  # 2 s for a prompt, then 0.5 s
    found = samples(driven.worker.metrics)
    assert found["tgi_inter_token_latency_duration_sum",] == (2.0 + 0.5) + 0.5 + (2.0 + 0.5)
    assert found["tgi_batch_concat_duration_sum", "method=decode"] == 4.0
    assert found["tgi_batch_forward_duration_sum", "method=prefill"] == 6.0
    assert found["tgi_batch_forward_duration_sum", "method=decode"] == 1.5
    driven.run()
    before = samples(driven.worker.metrics)["tgi_inter_token_latency_duration_sum",]
    clock.pass_s(1000)
    driven.arrive(Generate(4, LASTING, 2))
    driven.run()
    assert samples(driven.worker.metrics)["tgi_inter_token_latency_duration_sum",] == before + 0.5


def test_the_gauges_show_the_present(clock):
    driven = Driven(batch_size=1, max_total_tokens=40)

    def gauges():
        names = ["queue_size", "slots_busy", "batch_current_size", "batch_current_max_tokens", "last_step_age_seconds"]
        found = samples(driven.worker.metrics)
        return [found[f"tgi_{name}",] for name in names]

    assert gauges() == [0, 0, 0, 0, 0]
    clock.pass_s(400)
    driven.arrive(Generate(1, LASTING, 30), Generate(2, LASTING, 100))
    driven.step()
    assert gauges() == [1, 1, 1, 32, 0]
    clock.pass_s(7)
    assert gauges() == [1, 1, 1, 32, 7]
    driven.step()
    assert gauges() == [1, 1, 1, 32, 0]
    driven.arrive(Cancel(1, "test"))
    driven.step()
    assert gauges() == [0, 1, 1, 40, 0]
    driven.run()
    clock.pass_s(100)
    assert gauges() == [0, 0, 0, 0, 0]


def test_the_age_of_the_last_step_grows_while_the_first_prompt_hangs(clock):
    driven, ages = Driven(), []

    def hang(_chunks):
        clock.pass_s(30)
        ages.append(samples(driven.worker.metrics)["tgi_last_step_age_seconds",])

    driven.each_call(hang)
    driven.arrive(Generate(1, [1], 1))
    driven.run()
    assert ages == [30]


def test_a_phase_of_the_boot_counts_its_seconds(clock):
    metrics, wire = Metrics(""), Wire()
    with worker.Startup(Config(), wire, Admission(1), metrics).phase("loading", "weights"):
        clock.pass_s(12.5)
    assert wire.phase == "loading"
    assert samples(metrics)["tgi_startup_phase_seconds", "phase=loading"] == 12.5


def test_metrics_are_sent_while_the_device_hangs_in_a_step(tmp_path):
    driven = Driven()
    driven.model.may_run.clear()
    end = Link(f"ipc://{tmp_path}/worker.sock", driven.worker.metrics, driven.admission)
    web = Peer(f"ipc://{tmp_path}/worker.sock")
    driven.arrive(Generate(1, [1, 2], 1))
    loop = threading.Thread(target=driven.step, daemon=True)
    loop.start()
    web.send(SUCCESS)
    web.send(MetricsRequest(7))
    reply = web.next(MetricsText)
    assert loop.is_alive()
    assert reply.id == 7
    assert b"\ntgi_request_count 1.0\n" in reply.text
    driven.model.may_run.set()
    loop.join()
    web.close()
    end.close()


def test_prompt_tokens_that_a_slot_held_are_counted():
    driven = Driven(supports_chunked_prefill=True, prefix_granularity=1, max_total_tokens=100)
    for i in (1, 2):
        driven.arrive(Generate(i, list(range(20)), 3))
        driven.run()
    assert samples(driven.worker.metrics)["tgi_prefix_cache_tokens",] == 18


# vLLM's names


REQUEST_S = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 inf"
VLLM = {  # as in vllm/v1/metrics/loggers.py of August 2026: the type, or a histogram's buckets with 400 tokens of context
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "request_success_total": "counter",
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 "
    "2560 inf",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 inf",
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 inf",
    "request_generation_tokens": "1 2 5 10 20 50 100 200 inf",
    "request_max_num_generation_tokens": "1 2 5 10 20 50 100 200 inf",
}
MODEL = ("engine=0", "model_name=org/model")


def vllm(metrics, *, buckets=False):
    """The values under vLLM's names, without the prefix and the labels that all have."""
    found = {}
    for (name, *labels), value in samples(metrics, "vllm:").items():
        if (buckets or "_bucket" not in name) and not name.endswith("_info"):
            own = [label for label in labels if not label.startswith(("engine=", "model_name="))]
            found[" ".join([name.removeprefix("vllm:"), *own])] = value
    return found


def test_metrics_of_vllm_have_its_types_labels_and_buckets_and_are_there_from_startup():
    metrics = Metrics("org/model")
    metrics.describe_model(4, 200, 400, "float32", None)
    found = {name.removeprefix("vllm:"): kind for name, kind in types(metrics).items() if name.startswith("vllm:")}
    assert found.pop("cache_config_info") == "gauge"
    assert found == {name: kind if kind in ("gauge", "counter") else "histogram" for name, kind in VLLM.items()}
    series = {key: value for key, value in samples(metrics, "vllm:").items() if key[0] != "vllm:cache_config_info"}
    assert set(series.values()) == {0}
    labels = {
        name: {key[1:] for key in series if key[0].startswith(f"vllm:{name}") and "_bucket" not in key[0]} for name in VLLM
    }
    reasons = {(MODEL[0], f"finished_reason={reason}", MODEL[1]) for reason in ("stop", "length")}
    assert labels.pop("request_success_total") == reasons
    assert all(of_all == {MODEL} for of_all in labels.values())
    for name, of_vllm in VLLM.items():
        if found[name] == "histogram":
            infix = f"vllm:{name}_bucket"
            shown = [key[2].removeprefix("le=") for key in series if key[0] == infix]
            assert shown == [str(float(bound)).replace("inf", "+Inf") for bound in of_vllm.split()], name


@pytest.mark.parametrize(("granularity", "block_size", "blocks"), [(None, 16, 25), (1, 16, 25), (128, 128, 3)])
def test_the_kv_cache_is_described_in_blocks_that_prefix_caching_can_reuse(granularity, block_size, blocks):
    metrics = Metrics("m")
    metrics.describe_model(4, 50, 100, "bfloat16", granularity)
    ((key, value),) = [item for item in samples(metrics, "vllm:").items() if item[0][0] == "vllm:cache_config_info"]
    assert (dict(label.split("=") for label in key[1:]), value) == (
        {
            "block_size": str(block_size),
            "num_gpu_blocks": str(blocks),
            "cache_dtype": "bfloat16",
            "enable_prefix_caching": str(granularity is not None),
            "engine": "0",
        },
        1,
    )


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt install prometheus)")
def test_promtool_complains_of_metrics_of_vllm_for_nothing_but_the_colons_in_their_names():
    metrics = Metrics("org/model")
    metrics.describe_model(4, 200, 400, "float32", 1)
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, timeout=60)
    complaints = [line for line in done.stderr.decode().splitlines() if line.startswith("vllm:")]
    assert complaints and {line.partition(" ")[2] for line in complaints} == {"metric names should not contain ':'"}


@pytest.mark.parametrize("name", ['a"b', "C:\\models\\n", "two\nlines", "模型"])
def test_any_name_of_a_model_is_a_label_that_prometheus_reads(name):
    assert ("vllm:num_requests_running", "engine=0", f"model_name={name}") in samples(Metrics(name), "vllm:")


def test_a_request_that_succeeds_is_counted_once_under_the_names_of_vllm():
    metrics = with_limits()
    metrics.record(msgspec.structs.replace(SUCCESS, inference_s=4.0 - 0.25 - 0.5))
    counted = {name: value for name, value in vllm(metrics).items() if value}
    assert counted.pop("request_success_total finished_reason=length") == 1
    assert {name.removesuffix("_sum"): value for name, value in counted.items() if not name.endswith("_count")} == {
        "time_to_first_token_seconds": 1.0,
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 3.0,
        "request_prompt_tokens": 10,
        "request_generation_tokens": 6,
        "request_max_num_generation_tokens": 4,
    }
    assert {value for name, value in counted.items() if name.endswith("_count")} == {1}


def test_a_request_that_fails_after_its_first_token_has_only_the_time_to_it_under_the_names_of_vllm():
    metrics = with_limits()
    metrics.record(RequestStats(499, "dropped", first_token_s=2.0, input_tokens=10, generated_tokens=3))
    counted = {name: value for name, value in vllm(metrics).items() if value}
    assert counted == {"time_to_first_token_seconds_sum": 2.0, "time_to_first_token_seconds_count": 1}


class Truth:
    """What a driven worker does, as the model and the API server processes see it. Times are those of `clock`."""

    def __init__(self, driven, clock, chance):
        self.prompt_tokens = self.queries = self.hits = self.generated = 0
        self.latencies = []
        self.held = {}  # request id → tokens in its slot
        self._driven, self._clock, self._chance = driven, clock, chance
        self._token_at = {}
        driven.each_call(self._see_call)
        send, driven.wire.send = driven.wire.send, lambda peer, message: (self._see_message(message), send(peer, message))

    def _see_call(self, chunks):
        if self._chance.random() < 0.01:
            self._driven.model.failures.append(RuntimeError("on purpose"))
            return
        self._clock.pass_s(self._chance.choice([1 / 128, 1 / 16, 1 / 2, 3]))  # whose sums are exact
        prompts = {request.slot: request for request in self._driven.worker.scheduler.prefilling}
        for chunk in chunks:
            if request := prompts.get(chunk.slot):
                if request.id not in self.held:
                    self.hits += chunk.begin
                    self.queries += 0 if request.all_logits else len(request.prompt)
                    self.prompt_tokens += chunk.begin
                self.prompt_tokens += len(chunk.tokens)
                self.held[request.id] = chunk.begin + len(chunk.tokens)

    def _see_message(self, message):
        tokens = message.tokens if isinstance(message, Tokens) else []
        for request_id in {token.id for token in tokens}:
            if request_id in self._token_at:
                self.latencies.append(self._clock.now - self._token_at[request_id])
            self._token_at[request_id] = self._clock.now
        for token in tokens:
            self.generated += 1
            self.held[token.id] += 1

    def gauges(self):
        scheduler = self._driven.worker.scheduler
        with_slot = [*scheduler.prefilling, *scheduler.running]
        model = self._driven.model
        held = sum(self.held.get(request.id, request.cached) for request in with_slot)
        return {
            "num_requests_running": len(with_slot),
            "num_requests_waiting": self._driven.admission.count - len(with_slot),
            "kv_cache_usage_perc": held / (model.batch_size * model.max_total_tokens),
        }


def requests_of_all_kinds(chance, vocab_size):
    """Some with a common prefix, alone or several together, greedy or sampled, with draft tokens, with a grammar, …"""
    common = [chance.randrange(1, 50) for _ in range(30)]
    numbers = iter(range(500))
    for first in numbers:
        prompt = common[: chance.choice([0, 10, 30])] + [chance.randrange(1, 50) for _ in range(chance.choice([1, 5, 20]))]
        wanted = {"prediction": greedy(prompt, 20, vocab_size)}
        if chance.random() < 0.2:
            wanted = {"sampling": SamplingParams(seed=first, temperature=1.5)}
        kind = chance.choice(["plain", "plain", "logprobs", "prompt_logprobs", "grammar", "several"])
        if kind == "grammar":
            wanted["grammar"] = of_regex("[0-9]{3}-[a-z]{2}")
        elif kind != "several":
            wanted |= {"logprobs": kind == "logprobs", "prompt_logprobs": kind == "prompt_logprobs"}
        ids = [first, *(next(numbers, first) for _ in range(2 * (kind == "several")))]
        yield [Generate(number, prompt, chance.randrange(1, 25), **wanted) for number in dict.fromkeys(ids)]


@on_every_engine
def test_values_under_the_names_of_vllm_are_the_truth_under_any_load(engine, clock):
    chance = random.Random(54)
    tokenizer = byte_level()
    vocab_size = tokenizer.get_vocab_size()
    driven = Driven(
        grammars=grammars_of(tokenizer, eos_token_ids=[EOS]),
        vocab_size=vocab_size,
        batch_size=6,
        max_total_tokens=80,
        prefix_granularity=1,
        supports_prefix_copy=True,
        verify_length=4,
        max_queue_time=60,
        max_concurrent_requests=25,
        **engine,
    )
    truth = Truth(driven, clock, chance)
    metrics = driven.worker.metrics
    waiting = list(requests_of_all_kinds(chance, vocab_size))
    seen = []
    while waiting or not driven.is_idle:
        for _ in range(chance.choice([0] * 12 + [3, 8])):
            if waiting:
                driven.arrive(SubmitRequests(waiting.pop()))
        known = [request.id for request in driven.worker.requests]
        if known and chance.random() < 0.1:
            driven.arrive(Cancel(chance.choice(known), "on purpose"))
        driven.wire.interrupt()
        driven.step()
        if chance.random() < 0.1:
            seen.append(truth.gauges())
            found = vllm(metrics)
            assert {name: found[name] for name in seen[-1]} == seen[-1]
    found = vllm(metrics, buckets=True)
    expected = {
        **truth.gauges(),
        "prompt_tokens_total": truth.prompt_tokens,
        "generation_tokens_total": truth.generated,
        "prefix_cache_queries_total": truth.queries,
        "prefix_cache_hits_total": truth.hits,
        "inter_token_latency_seconds_count": len(truth.latencies),
        "inter_token_latency_seconds_sum": sum(truth.latencies),
    }
    for bound in VLLM["inter_token_latency_seconds"].split():
        le = str(float(bound)).replace("inf", "+Inf")
        within = [seconds for seconds in truth.latencies if seconds <= float(bound)]
        expected[f"inter_token_latency_seconds_bucket le={le}"] = len(within)
    assert {name: found[name] for name in expected} == expected
    assert truth.hits > 500 and metrics.series("speculation_accepted_tokens")._value.get() > 20
    assert {"cancelled", "overloaded", "failed", "length", "eos_token"} <= set(driven.ends.values())
    for name in seen[0]:
        assert len({gauges[name] for gauges in seen}) > 1, "the load changes"
