"""What /metrics shows: TGI's names, types and buckets; each request and each step counted once, with its times."""

import threading

import pytest
from fakes.model import EOS, greedy
from loop import Driven, Wire
from peer import Peer
from prometheus_client.parser import text_string_to_metric_families

import worker
from config import VERSION, Config
from engine.admission import Admission
from engine.link import Link, PeerLost
from engine.metrics import Metrics
from protocol import Cancel, Generate, MetricsRequest, MetricsText, RequestStats, Status, SubmitRequests

WAIT_S = 20
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
    metrics = Metrics()
    metrics.set_limits(4, 200, 400)
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
    assert all(name.startswith(("tgi_", "process_")) for name in found)


def test_the_version_and_the_process_are_there_under_prometheus_own_names():
    ours, found = samples(Metrics()), samples(Metrics(), "process_")
    assert ours["tgi_build_info", f"version={VERSION}"] == 1
    assert ours["tgi_ready",] == 0, "until the worker says so"
    assert found["process_cpu_seconds_total",] > 0 and found["process_resident_memory_bytes",] > 1e6


def test_the_text_is_what_prometheus_reads():
    metrics = with_limits()
    families = list(text_string_to_metric_families(metrics.render().decode()))
    shown = {name.replace("process_cpu_seconds_total", "process_cpu_seconds"): kind for name, kind in types(metrics).items()}
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


def test_before_the_limits_are_known_everything_else_is_there():
    missing = set(types(with_limits())) - set(types(Metrics()))
    assert missing == {"tgi_request_input_length", "tgi_request_generated_tokens", "tgi_request_max_new_tokens"}


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
    driven = Driven(batch_size=2, max_batch_prefill_tokens=1)
    driven.arrive(*(Generate(i, LASTING, 4) for i in range(3)))
    driven.run()  # two start one after the other, the third when the first has ended, beside the second
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.arrive(Generate(3, LASTING, 4))
    driven.run()
    driven.arrive(Generate(4, LASTING, 4))
    driven.step()
    driven.model.failures.append(RuntimeError("on purpose"))
    driven.run()
    found, steps = samples(driven.worker.metrics), driven.worker.steps
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
    metrics, wire = Metrics(), Wire()
    with worker.Startup(Config(), wire, Admission(1), metrics).phase("loading", "weights"):
        clock.pass_s(12.5)
    assert wire.status == Status("loading")
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
