"""`--otlp-endpoint` exports a trace of each request for text: a span below the client's, and one for each stage."""

import http.server
import importlib.util
import json
import threading
import time

import pytest
from processes import WAIT_S, Server, wait_until

import web
from config import Config

pytest.importorskip("opentelemetry.sdk", reason='needs the extra otel: pip install ".[otel]"')

CLIENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
NOT_SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00"}


class Collector:
    """An OpenTelemetry collector that takes OTLP over HTTP in JSON, and keeps the spans."""

    def __init__(self):
        self.resources, self.spans = [], []
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        self.may_answer.set()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def handler(collector):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                collector.is_asked.set()
                assert collector.may_answer.wait(WAIT_S)
                assert self.path == "/v1/traces"
                for resource in body["resourceSpans"]:
                    collector.resources.append(attributes(resource["resource"]))
                    collector.spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        return Handler

    def trace(self, name="POST /generate"):
        """The last trace whose first span has this name, when it has arrived: that span, and those below it, in order."""
        found = wait_until(lambda: [span for span in self.spans if span["name"] == name], name)[-1]
        return found, [span for span in self.spans if span.get("parentSpanId") == found["spanId"]]

    def close(self):
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()


def attributes(of):
    """The attributes of a span or a resource; each value is in a field that names its type."""
    return {entry["key"]: value_of(entry["value"]) for entry in of.get("attributes", [])}


def value_of(value):
    ((kind, given),) = value.items()
    return [value_of(each) for each in given["values"]] if kind == "arrayValue" else given


def times(span):
    return int(span["startTimeUnixNano"]) / 1e9, int(span["endTimeUnixNano"]) / 1e9


def names(spans):
    return [span["name"] for span in spans]


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(serve, collector, monkeypatch):
    """A server whose spans are exported at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "the-service")
    served = serve(otlp_endpoint=f"{collector.url}/v1/traces").get_ready()
    yield served
    served.assert_idle()


def test_a_request_is_a_span_below_the_clients_with_a_span_for_each_stage(traced, collector):
    before = time.time()
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 5}}
    response = traced.post("/generate", body, headers=CLIENT | {"x-request-id": "the-id"})
    assert response.status_code == 200
    request, stages = collector.trace()
    after = time.time()
    assert (request["traceId"], request["parentSpanId"]) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert request["kind"] == 2  # a server's
    assert attributes(request) == {
        "request_id": "the-id",
        "http.response.status_code": "200",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": "5",
        "gen_ai.usage.input_tokens": "3",
        "gen_ai.usage.output_tokens": "5",
    }
    assert request.get("status", {}).get("code", 0) == 0
    assert names(stages) == ["validate", "queue", "prefill", "decode"]
    moments = [moment for stage in stages for moment in times(stage)]
    assert moments == sorted(moments)  # each begins where the one before ends
    assert before <= times(request)[0] == moments[0] and moments[-1] <= times(request)[1] <= after
    assert {span["traceId"] for span in stages} == {request["traceId"]}
    assert collector.resources[0]["service.name"] == "the-service"


def test_a_stream_has_a_span_from_its_first_event_to_its_last(traced, collector):
    with traced.post("/generate_stream", {"inputs": "abc", "parameters": {"max_new_tokens": 5}}) as response:
        response.get_data()
    request, stages = collector.trace("POST /generate_stream")
    assert names(stages) == ["validate", "queue", "prefill", "decode", "stream"]
    begins, ends = times(stages[-1])
    assert times(stages[2])[1] <= begins and ends == times(request)[1]


def test_each_sequence_of_a_request_has_spans_of_its_own(traced, collector):
    traced.post("/v1/completions", {"prompt": ["abc", "de"], "n": 2, "temperature": 1, "max_tokens": 3})
    _request, stages = collector.trace("POST /v1/completions")
    assert names(stages) == ["validate", *("queue", "prefill", "decode") * 4]
    assert [attributes(stage)["sequence"] for stage in stages[1:]] == [str(i) for i in range(4) for _ in range(3)]


def test_a_request_that_is_refused_shows_its_status_and_no_stage_after_the_validation(traced, collector):
    assert traced.post("/generate", {"inputs": ""}).status_code == 422
    request, stages = collector.trace()
    assert names(stages) == ["validate"]
    assert (attributes(request)["http.response.status_code"], attributes(request)["error.type"]) == ("422", "validation")
    assert request.get("status", {}).get("code", 0) == 0  # an error of the client


def test_a_failure_of_the_device_is_an_error_of_the_span(traced, collector):
    traced.model.fail_next_prefill = True
    assert traced.post("/generate", {"inputs": "abc"}).status_code == 424
    request, stages = collector.trace()
    assert names(stages) == ["validate"]
    assert (attributes(request)["http.response.status_code"], attributes(request)["error.type"]) == ("424", "generation")
    assert request["status"]["code"] == 2


def test_a_stream_that_its_client_leaves_is_marked_as_dropped_and_has_the_stages_until_then(traced, collector):
    response = traced.client.post("/generate_stream", json={"inputs": "abc", "parameters": {"max_new_tokens": 50}})
    response.close()
    request, stages = collector.trace("POST /generate_stream")
    assert attributes(request)["error.type"] == "dropped"
    assert names(stages) == ["validate", "queue", "prefill", "decode", "stream"]
    assert times(stages[-1])[1] == times(request)[1]


def test_a_trace_that_the_client_does_not_sample_is_not_exported(traced, collector):
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 2}}
    traced.post("/generate", body, headers=NOT_SAMPLED)
    traced.post("/generate", body, headers=CLIENT)
    collector.trace()
    assert {span["traceId"] for span in collector.spans} == {CLIENT["traceparent"].split("-")[1]}


@pytest.mark.parametrize("header", ["", "00-0-0-01", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "é"])
def test_a_header_that_names_no_span_begins_a_trace(traced, collector, header):
    assert traced.post("/generate", {"inputs": "abc"}, headers={"traceparent": header}).status_code == 200
    assert not collector.trace()[0].get("parentSpanId")


def test_health_and_metrics_are_not_traced(traced, collector):
    assert [traced.client.get(path).status_code for path in ("/health", "/info", "/metrics")] == [200] * 3
    traced.post("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 2}})
    collector.trace()
    assert names(collector.spans).count("POST /generate") == 1
    assert set(names(collector.spans)) == {"POST /generate", "validate", "queue", "prefill", "decode"}


@pytest.fixture
def main(monkeypatch, caplog):
    """web.py's `main` with an endpoint for traces: its exit code, and the one line that it logs."""
    monkeypatch.setattr(web.configuration, "resolved", lambda: Config(otlp_endpoint="http://127.0.0.1:4318/v1/traces"))
    monkeypatch.setattr("logs.set_up", lambda *_: None)
    monkeypatch.setattr("web.die_with_parent", lambda: None)
    return lambda: (web.main(), *caplog.messages)


def test_without_the_packages_the_server_ends_with_one_line(main, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    code, line = main()
    assert code == 2 and "--otlp-endpoint (OTLP_ENDPOINT)" in line and 'pip install ".[otel]"' in line


@pytest.mark.processes
def test_a_collector_that_hangs_delays_no_request_and_gets_all_spans_when_the_server_stops(collector):
    collector.may_answer.clear()
    with Server("--otlp-endpoint", collector.url, OTEL_BSP_SCHEDULE_DELAY="50") as server:
        server.wait_ready()
        for _ in range(3):
            assert server.generate("Hello", max_new_tokens=3)[0] == 200
            assert collector.is_asked.wait(WAIT_S)  # from now on an export is in progress
        assert server.get("/live")[0] == 200 and collector.spans == []
        collector.may_answer.set()
        assert server.stop() == 0
    assert names(collector.spans).count("POST /generate") == 3
    assert {resource["service.name"] for resource in collector.resources} == {"text-generation-inference.router"}


@pytest.mark.processes
def test_a_server_that_stops_waits_less_for_a_collector_that_hangs_than_the_exporter_would(collector):
    collector.may_answer.clear()
    with Server("--otlp-endpoint", collector.url, OTEL_BSP_SCHEDULE_DELAY="600000") as server:
        server.wait_ready()
        assert server.generate("Hello", max_new_tokens=3)[0] == 200
        begins = time.monotonic()
        assert server.stop() == 0
        assert (
            collector.is_asked.is_set() and time.monotonic() - begins < 10
        )  # the exporter itself waits for 10 s, the server for 2
