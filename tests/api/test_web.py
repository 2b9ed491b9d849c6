"""The Flask app around the routes: request ids, CORS, the page of the document, and that every request is counted once."""

import msgspec
import pytest
from openai_api import CHAT, MESSAGES
from served import wait_until


def test_a_request_keeps_the_id_of_its_client_in_header_answer_and_log(served, caplog):
    caplog.set_level("INFO")
    given = {"X-Request-Id": "client-1.a_B"}
    answer = served.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, headers=given)
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("client-1.a_B", "cmpl-client-1.a_B")
    wait_until(lambda: any(getattr(record, "fields", {}).get("request_id") == "client-1.a_B" for record in caplog.records))
    refused = served.post("/generate", b"{", headers=given)
    assert refused.headers["x-request-id"] == "client-1.a_B"


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "ä", "a\tb"])
def test_an_id_that_is_none_is_replaced_by_a_new_one(served, given):
    headers = {"X-Request-Id": given} if given else {}
    first, second = (served.client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == 24


def test_the_page_of_the_document_needs_no_other_server(served):
    page = served.client.get("/docs/").get_data(as_text=True)
    assert "swagger" in page
    assert '"../api-doc/openapi.json"' in page, "it is found below a proxy's path, too"
    assert "http://" not in page.replace("http://localhost/", "")
    assert "https://" not in page


def test_the_page_for_people_is_reached_on_this_host_whatever_the_request_calls_it(served):
    response = served.client.get("/docs", headers={"Host": "evil.example"})
    assert (response.status_code, response.headers["Location"]) == (302, "/docs/")


def test_with_a_root_path_every_route_is_there_below_it_and_without_it(serve):
    served = serve(root_path="/serve").get_ready()
    for root in ("/serve", ""):
        answer = served.client.get(f"{root}/infer?sentence=Hi%20there")
        assert answer.json == served.client.get("/infer?sentence=Hi there").json
        assert served.post(f"{root}/v1/chat/completions", {"messages": [{"role": "robot"}]}).json["error"]["code"]
        assert "<!doctype html>" in served.client.get(f"{root}/", headers={"Accept": "text/html"}).text
        with served.client.get(f"{root}/page/page.css") as style:
            assert "color" in style.text
        assert served.client.get(f"{root}/docs").headers["Location"] == f"{root}/docs/"
        assert served.client.get(f"{root}/api-doc/openapi.json").json["servers"] == [{"url": root or "/"}]
    assert served.client.get("/serve").status_code == 308, "the page finds its files below /serve/"
    for elsewhere in ("/server/info", "/serve/serve/info", "/other/info"):
        assert served.client.get(elsewhere).status_code == 404


def test_a_root_path_that_routes_begin_with_hides_none_of_them(serve):
    served = serve(root_path="/v1").get_ready()
    for path in ("/v1/models", "/v1/v1/models"):
        assert served.client.get(path).status_code == 200
    assert served.client.get("/v1/info").json["version"]


@pytest.mark.parametrize(
    "routes",
    [
        {"health_route": "/v1/endpoints/1/deployedModels/2", "predict_route": "/v1/endpoints/1/deployedModels/2:predict"},
        {"health_route": "/predict", "predict_route": "/predict"},
        {"health_route": "/", "predict_route": "/vertex"},
        {},
    ],
)
@pytest.mark.parametrize("root_path", [None, "/v1"])
def test_vertex_finds_health_and_predictions_on_the_paths_that_it_asks_for(serve, routes, root_path):
    served = serve(root_path=root_path, api_key="Secret", **routes)
    health, predict = routes.get("health_route", "/health"), routes.get("predict_route", "/vertex")
    assert served.client.get(health).status_code == 503
    served.get_ready()
    for path in (health, "/health", "/ping"):
        assert served.client.get(path).status_code == 200
    body, key = {"instances": [{"inputs": "Hi", "parameters": {"max_new_tokens": 2}}]}, {"Authorization": "Bearer Secret"}
    expected = served.post("/vertex", body, headers=key).json
    assert len(expected["predictions"]) == 1
    assert served.post(predict, body, headers=key).json == expected
    assert served.post(predict, body).status_code == 401
    refused = served.post(predict, {"instances": []}, headers=key)
    assert (refused.status_code, list(refused.json)) == (422, ["error", "error_type"])


def test_a_path_that_vertex_asks_for_replaces_no_route(serve):
    served = serve(health_route="/v1/models", predict_route="/v1/completions").get_ready()
    assert served.client.get("/v1/models").json["object"] == "list"
    assert served.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).json["choices"]


def test_below_a_root_path_the_key_is_needed_as_elsewhere(serve):
    served = serve(root_path="/serve", api_key="Secret").get_ready()
    assert served.client.get("/serve/infer?sentence=Hi").status_code == 401
    assert served.client.get("/serve/health").status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/nowhere"])
def test_browsers_may_ask_from_anywhere_unless_told_otherwise(serve, path):
    served = serve(api_key="Secret").get_ready()
    asked = served.client.options(path, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 200
    assert asked.headers["Access-Control-Allow-Origin"] == "*"
    assert asked.headers["Access-Control-Allow-Methods"] == "GET,POST,PUT,DELETE"
    assert {"authorization", "content-type"} <= set(asked.headers["Access-Control-Allow-Headers"].split(","))
    refused = served.client.get(path)
    assert refused.headers["Access-Control-Allow-Origin"] == "*"
    assert "origin" in refused.headers["Vary"].lower()


def test_with_a_list_of_origins_only_these_may_ask(serve):
    served = serve(cors_allow_origin=("https://a.example", "https://b.example")).get_ready()
    for origin in ("https://a.example", "https://b.example"):
        response = served.client.get("/health", headers={"Origin": origin})
        assert response.headers["Access-Control-Allow-Origin"] == origin
    for origin in ("https://c.example", "https://a.example.evil", ""):
        assert "Access-Control-Allow-Origin" not in served.client.get("/health", headers={"Origin": origin}).headers


def test_without_origins_no_response_names_one(serve):
    served = serve(cors_allow_origin=()).get_ready()
    for headers in ({}, {"Origin": "https://a.example"}):
        assert "Access-Control-Allow-Origin" not in served.client.get("/health", headers=headers).headers


@pytest.mark.parametrize("written", ["/opt/ml/model", "%2Fopt%2Fml%2Fmodel"])
def test_a_model_that_is_named_as_its_folder_is_found_by_that_name(serve, written):
    served = serve()
    served.info = msgspec.structs.replace(served.info, model_name="/opt/ml/model")
    served.get_ready()
    assert served.client.get(f"/v1/models/{written}").json["id"] == "/opt/ml/model"
    assert served.client.post(f"/predictions/{written}", data=b"Hi").status_code == 200


def test_a_key_beyond_ascii_works_as_curl_sends_it(serve):
    served = serve(api_key="Schlüssel").get_ready()
    sent = "Bearer Schlüssel".encode().decode("latin-1")
    assert served.client.get("/info", headers={"Authorization": sent}).status_code == 200


def test_keys_of_a_file_are_taken_beside_the_one_of_the_setting_and_can_be_replaced(serve, tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("old\nsecond\n")
    served = serve(api_key="own", api_key_file=str(file)).get_ready()

    def taken():
        asked = {key: {"Authorization": f"Bearer {key}"} for key in ("own", "old", "second", "new", "")}
        return {key for key, headers in asked.items() if served.client.get("/info", headers=headers).status_code == 200}

    assert taken() == {"own", "old", "second"}
    (tmp_path / "next").write_text("second\n\nnew\n")
    (tmp_path / "next").rename(file)
    assert taken() == {"own", "second", "new"}
    for broken in ("", "two words\n"):
        (tmp_path / "next").write_text(broken)
        (tmp_path / "next").rename(file)
        assert taken() == {"own", "second", "new"}, "a server is never open because its file is broken"
    file.unlink()
    assert taken() == {"own", "second", "new"}
    assert "--api-key-file: reload failed, keeping the current keys: " in caplog.text


def test_a_refused_request_has_one_line_that_says_why_without_what_the_client_wrote(serve, caplog):
    caplog.set_level("INFO")
    served = serve(api_key="Secret").get_ready()
    headers = {"Authorization": "Bearer Secret"}
    caplog.clear()
    served.client.get("/info")
    served.post("/generate", {"inputs": "my words", "parameters": {"temperature": -1}}, headers=headers)
    served.client.get("/nowhere", headers=headers)
    served.client.get("/health")
    refused = [record.fields for record in caplog.records if record.getMessage() == "request rejected"]
    assert [fields["status"] for fields in refused] == [401, 422, 404]
    assert "Unauthorized" in refused[0]["error"] and "temperature" in refused[1]["error"]
    assert "my words" not in str(refused) and all(fields["request_id"] for fields in refused)


def test_every_request_for_text_is_counted_once(served):
    assert served.counts()["tgi_request_count_total"] == 0
    small = {"max_new_tokens": 3, "temperature": 0.5}
    served.post("/generate", {"inputs": "a", "parameters": small | {"best_of": 2}})
    served.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    with served.post(CHAT, MESSAGES | {"stream": True}) as stream:
        stream.get_data()
    served.post("/vertex", {"instances": [{"inputs": "a", "parameters": small}] * 2})
    served.wait_for_count("tgi_request_success_total", 4)
    served.post("/generate", {"inputs": ""})
    served.post("/v1/completions", b"{")
    served.post("/v1/chat/completions", {"messages": [{"role": "forbidden", "content": "x"}]})
    served.model.fail_next_prefill = True
    served.post("/generate", {"inputs": "a"})
    served.wait_for_count("tgi_request_count_total", 8)
    seen = served.counts()
    assert seen["tgi_request_success_total"] == seen["tgi_request_duration_count"] == 4
    assert seen["tgi_request_time_to_first_token_duration_count"] == 4
    failures = {name: value for name, value in seen.items() if name.startswith("tgi_request_failure") and value}
    assert failures == {
        f"tgi_request_failure_total,{err}": n for err, n in (("validation", 2), ("template", 1), ("generation", 1))
    }


def test_requests_for_text_have_under_the_names_of_vllm_what_their_responses_say(served):
    usages = [
        served.post("/v1/completions", body | {"temperature": 0}).json["usage"]
        for body in (
            {"prompt": "a", "max_tokens": 3, "ignore_eos": True},
            {"prompt": ["a", "bcd"], "max_tokens": 5, "n": 2, "ignore_eos": True},
            {"prompt": "a", "max_tokens": 20, "stop": [served.tokenizer.decode(served.expected("a", 2)[1:])]},
        )
    ]
    assert usages[2]["completion_tokens"] < 20
    served.wait_for_count("tgi_request_success_total", 3)
    served.model.fail_next_prefill = True
    served.post("/generate", {"inputs": "a"})
    served.wait_for_count("tgi_request_count_total", 4)
    seen = served.counts()
    vllm = {name.removeprefix("vllm:"): value for name, value in seen.items() if name.startswith("vllm:")}
    assert (vllm["request_success_total,length"], vllm["request_success_total,stop"]) == (2, 1)
    assert vllm["generation_tokens_total"] == seen["tgi_generated_tokens_total"]
    assert vllm["request_prompt_tokens_sum"] == sum(usage["prompt_tokens"] for usage in usages)
    assert vllm["request_generation_tokens_sum"] == sum(usage["completion_tokens"] for usage in usages)
    assert vllm["request_max_num_generation_tokens_sum"] == 3 + 5 + usages[2]["completion_tokens"]
    times = ("request_queue_time", "request_prefill_time", "request_decode_time")
    parts = [vllm[f"{name}_seconds_sum"] for name in times]
    assert all(part >= 0 for part in parts)
    whole = seen["tgi_request_duration_sum"] - seen["tgi_request_validation_duration_sum"]
    assert vllm["e2e_request_latency_seconds_sum"] == seen["tgi_request_duration_sum"]
    assert sum(parts) >= whole or sum(parts) == pytest.approx(whole)
    assert {vllm[f"{name}_seconds_count"] for name in (*times, "e2e_request_latency", "time_to_first_token")} == {3}


def test_what_is_no_request_for_text_is_not_counted_as_one(served):
    served.client.get("/health")
    served.client.get("/info")
    served.post("/tokenize", {"inputs": "a"})
    served.client.get("/nowhere")
    served.client.get("/generate")
    served.post("/tokenize", b"{")
    served.wait_for_count("tgi_http_errors_total,400", 1)
    seen = served.counts()
    assert (seen["tgi_http_errors_total,404"], seen["tgi_http_errors_total,405"]) == (1, 1)
    assert seen["tgi_request_count_total"] == 0
