"""A request gets the LoRA adapter that it names, in every API; an unknown name is refused in the API's own words."""

import json
import logging

import pytest
from openai_api import CHAT, COMPLETION, MESSAGES, PROMPT, RESPONSES, chunks, refusal, streamed_text, whole

ADAPTERS = ("french", "owner/sql")
ANTHROPIC = "/v1/messages"
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
NATIVE = {"inputs": "Hi", "parameters": {"max_new_tokens": 8}}
ANTHROPIC_MODELS = {"headers": {"anthropic-version": "2023-06-01"}}


@pytest.fixture
def served(serve):
    return serve(adapters=ADAPTERS).get_ready()


def native(served, adapter=None):
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 8, "details": True, "adapter_id": adapter}}
    return [token["id"] for token in whole(served, "/generate", body)["details"]["tokens"]]


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_tgis_adapter_id_chooses_the_adapter(served, adapter):
    assert native(served, adapter) == served.expected("Hi", 8, adapter)
    assert native(served, "") == native(served) == served.expected("Hi", 8)


def texts(served, route, body, of):
    """By the name in `model`: the answer's own name for its model, and its text."""
    found = {}
    for name in ("m", *ADAPTERS):
        answer = whole(served, route, body | {"model": name})
        assert answer["model"] == name
        found[name] = of(answer)
    assert len(set(found.values())) == 3
    assert of(whole(served, route, body)) == found["m"]
    return found


def test_every_api_takes_the_adapters_name_as_its_model_and_answers_with_it(served):
    chats = texts(served, CHAT, MESSAGES, lambda answer: answer["choices"][0]["message"]["content"])
    texts(served, COMPLETION, PROMPT, lambda answer: answer["choices"][0]["text"])
    asked = {"input": "Hi", "max_output_tokens": 12, "temperature": 0}
    responses = texts(served, RESPONSES, asked, lambda answer: answer["output"][0]["content"][0]["text"])
    messages = texts(served, ANTHROPIC, MESSAGES, lambda answer: answer["content"][0]["text"])
    assert chats == responses == messages
    assert whole(served, CHAT, MESSAGES | {"model": "tgi"})["choices"][0]["message"]["content"] == chats["m"]
    assert whole(served, CHAT, MESSAGES | {"model": "tgi"})["model"] == "m"


def test_streams_and_several_choices_are_of_the_adapter(served):
    body = MESSAGES | {"model": "french"}
    stream = chunks(served, CHAT, body)
    text = whole(served, CHAT, body)["choices"][0]["message"]["content"]
    assert streamed_text(stream) == text and {chunk["model"] for chunk in stream} == {"french"}
    choices = whole(served, CHAT, body | {"n": 3})["choices"]
    assert [choice["message"]["content"] for choice in choices] == [text] * 3


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, MESSAGES),
        (COMPLETION, PROMPT),
        (RESPONSES, {"input": "Hi"}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/responses/compact", {"input": "Hi"}),
    ],
)
def test_an_unknown_model_is_refused_as_openai_does(served, route, body):
    error = refusal(served, route, body | {"model": "German"}, 404)
    assert (error["code"], error["type"]) == ("model_not_found", "invalid_request_error")
    assert error["message"] == "The model 'German' is not served here; served: 'm', 'french', 'owner/sql'"


def test_an_unknown_model_is_refused_as_anthropic_does(served):
    refused = served.post(ANTHROPIC, MESSAGES | {"model": "German"})
    assert refused.status_code == 404 and refused.json["error"]["type"] == "not_found_error"
    assert served.post("/v1/messages/count_tokens", {"messages": MESSAGES["messages"], "model": "German"}).status_code == 404


def test_an_unknown_adapter_id_is_refused_as_any_wrong_value(served):
    refused = served.post("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "German"}})
    assert refused.status_code == 422
    assert (
        "`adapter_id` must be a served adapter: french, owner/sql (--lora-adapters). Given: 'German'" in refused.json["error"]
    )


def test_sagemakers_header_chooses_the_adapter_before_the_body(served):
    def invoked(body, adapter):
        response = served.post("/invocations", body, headers={HEADER: adapter})
        assert response.status_code == 200
        return response.json

    chat = whole(served, CHAT, MESSAGES | {"model": "french"})["choices"]
    assert invoked(MESSAGES, "french")["choices"] == chat == invoked(MESSAGES | {"model": "owner/sql"}, "french")["choices"]
    assert invoked(MESSAGES, "french")["model"] == "french"
    assert invoked(PROMPT, "french")["choices"] == whole(served, COMPLETION, PROMPT | {"model": "french"})["choices"]
    asked = NATIVE | {"parameters": {"max_new_tokens": 8, "adapter_id": "french"}}
    assert invoked(NATIVE, "french")[0]["generated_text"] == whole(served, "/", asked)[0]["generated_text"]
    json_of_text = {HEADER: "french", "Accept": "application/json"}
    of_text = served.post("/invocations", b"Hi", content_type="text/plain", headers=json_of_text).json
    assert of_text[0]["generated_text"].startswith(whole(served, "/", asked)[0]["generated_text"])
    refused = served.post("/invocations", NATIVE, headers={HEADER: "German"})
    assert refused.status_code == 404 and "'German' is not served here" in refused.json["error"]


def test_torchserves_path_chooses_the_adapter(served):
    def predicted(name):
        return served.post(f"/predictions/{name}", b"Hi", content_type="text/plain").get_data(as_text=True)

    assert len({predicted(name) for name in ("m", *ADAPTERS)}) == 3
    assert served.post("/predictions/German", b"Hi", content_type="text/plain").status_code == 404


def test_vertex_instances_choose_their_own_adapters(served):
    instances = [{"inputs": "Hi", "parameters": {"max_new_tokens": 8, "adapter_id": name}} for name in ("", *ADAPTERS)]
    predictions = whole(served, "/vertex", {"instances": instances})["predictions"]
    assert len(set(predictions)) == 3


def test_models_and_info_list_the_adapters(served):
    listed = served.client.get("/v1/models").json["data"]
    assert [card["id"] for card in listed] == ["m", *ADAPTERS]
    assert [(card.get("root"), card.get("parent")) for card in listed] == [
        (None, None),
        ("/adapters/french", "m"),
        ("/adapters/owner/sql", "m"),
    ]
    assert served.client.get("/v1/models/owner/sql").json == listed[2]
    assert served.client.get("/v1/models/German").status_code == 404
    anthropic = served.client.get("/v1/models", **ANTHROPIC_MODELS).json
    assert [card["id"] for card in anthropic["data"]] == ["m", *ADAPTERS] and anthropic["last_id"] == "owner/sql"
    assert served.client.get("/info").json["adapters"] == list(ADAPTERS)


def test_metrics_and_logs_have_the_adapters_name(served, caplog):
    caplog.set_level(logging.DEBUG)
    whole(served, CHAT, MESSAGES | {"model": "french"})
    whole(served, CHAT, MESSAGES)
    served.wait_for_count("tgi_adapter_requests_total,french", 1)
    assert sum("tgi_adapter_requests_total" in name for name in served.counts()) == 1
    named = [record.message for record in caplog.records if getattr(record, "fields", {}).get("adapter") == "french"]
    assert sorted(named) == ["prompt begins", "sent to the worker"]


def test_without_adapters_any_model_is_the_one_that_is_served(serve):
    served = serve().get_ready()
    assert whole(served, CHAT, MESSAGES | {"model": "gpt-4o"})["model"] == "m"
    assert json.dumps(served.client.get("/v1/models").json).count("parent") == 0


@pytest.fixture
def changing(serve, tmp_path):
    """A server whose adapters can be changed, with a folder `new` to load from."""
    (tmp_path / "adapters" / "new").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    return serve(adapters=ADAPTERS, lora_folder=str(tmp_path / "adapters"), served_model_name="m").get_ready()


def load(served, name="late", path="new", **options):
    return served.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | options)


def unload(served, name="late"):
    return served.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_an_adapter_is_loaded_used_and_unloaded_in_vllms_words(changing, tmp_path):
    loaded = load(changing)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert changing.read == [("late", str(tmp_path / "adapters" / "new"))]
    assert native(changing, "late") == changing.expected("Hi", 8, "late") != native(changing)
    cards = changing.client.get("/v1/models").json["data"]
    assert (cards[-1]["id"], cards[-1]["root"], cards[-1]["parent"]) == ("late", str(tmp_path / "adapters" / "new"), "m")
    unloaded = unload(changing)
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
    refusal(changing, CHAT, MESSAGES | {"model": "late"}, 404)
    assert unload(changing).status_code == 404


def test_an_adapter_is_loaded_in_the_place_of_another(changing, tmp_path):
    before = native(changing, "french")
    for name, path in {"french": "new", "late": "new", "owner/sql": "owner/adapter"}.items():
        assert load(changing, name, path, load_inplace=True).status_code == 200
    cards = {card["id"]: card.get("root") for card in changing.client.get("/v1/models").json["data"]}
    new = str(tmp_path / "adapters" / "new")
    assert cards == {"m": None, "french": new, "owner/sql": "owner/adapter", "late": new}
    assert native(changing, "french") == changing.expected("Hi", 8, "french") != before
    assert unload(changing, "french").status_code == 200


def test_sagemakers_routes_do_the_same(changing):
    assert changing.post("/adapters", {"name": "late", "src": "new"}).status_code == 200
    assert whole(changing, CHAT, MESSAGES | {"model": "late"})["model"] == "late"
    taken = changing.post("/adapters", {"name": "late", "src": "new"})
    assert taken.status_code == 400 and "late is served already" in taken.text
    assert changing.client.delete("/adapters/late").status_code == 200
    assert changing.client.delete("/adapters/late").status_code == 404


def test_a_number_is_not_used_again_so_no_prefix_of_an_older_adapter_is(changing):
    numbers = []
    for _ in range(3):
        assert load(changing).status_code == 200
        numbers.append(changing.model.adapters.numbers["late"])
        assert native(changing, "late") == changing.expected("Hi", 8, "late")
        assert unload(changing).status_code == 200
    assert len(set(numbers)) == 3


OF_NO_HUB = ["owner/..", "owner/name@../blobs/0a", "owner/name@a/../../x", "owner/name@/etc"]
NEITHER = ["../damaged", "/etc", "nothing", "", ".", "a/b/c", "owner/../../x", "./x", "a\0b", "x" * 300, *OF_NO_HUB]


@pytest.mark.parametrize("path", NEITHER)
def test_a_path_outside_of_the_folder_is_refused(changing, path):
    refused = load(changing, path=path)
    assert refused.status_code == 400 and changing.read == []
    assert "`lora_path` must be a folder below that of --lora-folder, or an id on the hub" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("french", "new", "french is served already: unload it, or load the other with `load_inplace` true"),
        ("m", "new", "`lora_name` must not be a name that requests have for the model itself"),
        ("tgi", "new", "`lora_name` must not be a name that requests have for the model itself"),
        ("late", "owner/damaged@v1", "The LoRA adapter cannot be changed: on purpose"),
        ("", "new", "`lora_name` must be a name of at most 200 printable characters"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(changing, name, path, reason):
    refused = load(changing, name, path)
    assert refused.status_code == 400 and reason in refused.json["error"]["message"]
    assert native(changing, "french") == changing.expected("Hi", 8, "french")


def test_without_the_setting_adapters_stay_as_they_are(served):
    for refused in (load(served), unload(served, "french"), served.client.delete("/adapters/french")):
        assert refused.status_code == 403
        assert "--lora-folder (LORA_FOLDER) allows it" in refused.text
    assert native(served, "french") == served.expected("Hi", 8, "french")


def test_with_the_setting_an_unknown_model_is_refused_before_any_adapter_is_loaded(changing):
    for name in ADAPTERS:
        assert unload(changing, name).status_code == 200
    refusal(changing, CHAT, MESSAGES | {"model": "german"}, 404)
    assert whole(changing, CHAT, MESSAGES | {"model": "m"})["model"] == "m"


OF_ANTHROPIC = ("type", "not_found_error")
OF_OPENAI = ("code", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "name", "value"),
    [
        (CHAT, MESSAGES | {"model": "french"}, *OF_OPENAI),
        (COMPLETION, PROMPT | {"model": "french"}, *OF_OPENAI),
        (RESPONSES, {"input": "Hi", "model": "french"}, *OF_OPENAI),
        (ANTHROPIC, MESSAGES | {"model": "french"}, *OF_ANTHROPIC),
        ("/", {"inputs": "Hi", "parameters": {"adapter_id": "french"}}, "error_type", "not_found"),
    ],
)
def test_an_adapter_that_is_unloaded_before_the_worker_has_the_request_is_an_unknown_one(
    changing, route, body, name, value, stream
):
    """The API server process does not know of it yet."""
    del changing.model.adapters.numbers["french"]
    refused = changing.post(route, body | {"stream": stream})
    assert refused.status_code == 404
    error = refused.json["error"] if route != "/" else refused.json
    assert error[name] == value
    assert "The LoRA adapter 'french' has been unloaded" in refused.text
    changing.assert_idle()
