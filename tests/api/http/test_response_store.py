"""The stored responses of `/v1/responses`: who reads them, what goes on from them, and what happens when they are gone."""

import contextlib
import json
import re
import sqlite3
import threading

import pytest
from asked import CONFIG, INFO, record_renders, text, written
from openai_api import RESPONSES, refusal, whole

from api.generation.prepared_request import Served
from api.http import fields, response_store
from api.http.errors import ApiError
from api.http.response_store import OwnedResponses, ResponseStore, StoredResponse, StoreError
from api.openai import responses

BODY = {"input": "Hi", "max_output_tokens": 3, "temperature": 0}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}, {"type": "custom", "name": "patch"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input":"x = 1"}}\n</tool_call>'
MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    return ResponseStore(tmp_path / "responses", MIB)


class Client:
    """The requests with one API key; the model answers what a test says."""

    def __init__(self, store, key=b"key", max_bytes=5000):
        self.store = store
        self.key = key
        self.max_bytes = max_bytes

    @property
    def owned(self):
        return OwnedResponses(self.store, self.key, self.max_bytes)

    def writer(self, **body):
        served = Served(CONFIG, INFO, text(), self.owned)
        return responses.responses(fields.parse_body(json.dumps({"input": "Hi"} | body).encode()), served)

    def ask(self, answer="Yes", finish_reason="eos_token", **body):
        return written(self.writer(**body), answer, finish_reason)

    def prompt(self, **body):
        (prepared,) = self.writer(store=False, **body).requests
        return prepared.prompt

    def error(self, **body):
        with pytest.raises(ApiError) as refused:
            self.writer(**body)
        return refused.value

    def has(self, id):
        with contextlib.suppress(ApiError):
            return bool(self.owned.get(id))

    def stored(self, id):
        return json.loads(self.owned.get(id))


@pytest.fixture
def client(store):
    return Client(store)


def entry(id, size=1000):
    return StoredResponse(id, None, b"i" * size, b"o", b"r")


# The file


def test_the_oldest_entries_make_room_in_a_file_that_does_not_grow(client, tmp_path):
    for n in range(40):
        assert client.owned.save(entry(f"resp_{n}", 100_000))
    kept = [n for n in range(40) if client.has(f"resp_{n}")]
    assert kept == list(range(40 - len(kept), 40)) and 8 <= len(kept) <= 10
    assert (tmp_path / "responses").stat().st_size <= 1.1 * MIB


def test_an_entry_that_is_larger_than_the_file_may_be_is_not_stored_and_costs_no_other(client):
    assert client.owned.save(entry("resp_1"))
    assert not client.owned.save(entry("resp_2", MIB))
    assert client.has("resp_1") and not client.has("resp_2")


def test_writers_wait_for_each_other(client, caplog, monkeypatch):
    monkeypatch.setattr(response_store, "BUSY_S", 60)  # on a slow disk, too

    def write(writer):
        own = client.owned
        for n in range(20):
            own.save(entry(f"resp_{writer}_{n}"))

    writers = [threading.Thread(target=write, args=[n]) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(client.has(f"resp_{writer}_{n}") for writer in range(4) for n in range(20))
    assert not caplog.records


def test_a_file_that_cannot_be_written_costs_no_response_and_is_one_line_in_the_log(client, tmp_path, caplog):
    (tmp_path / "responses").write_text("no database " * 1000)
    answer = client.ask()
    assert (answer["status"], answer["store"], answer["output"][0]["content"][0]["text"]) == ("completed", False, "Yes")
    assert caplog.messages == ["a response was not stored: file is not a database"]
    streamed = client.ask(stream=True)
    assert '"type":"response.completed"' in streamed and '"store":false' in streamed.splitlines()[-2]


@pytest.fixture
def lock(client, tmp_path, monkeypatch):
    """A process that holds the file, as one that hangs in the middle of a change."""
    assert client.owned.save(entry("resp_1"))
    monkeypatch.setattr(response_store, "BUSY_S", 0.01)
    with contextlib.closing(sqlite3.connect(tmp_path / "responses", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield other


def test_a_locked_file_costs_no_response_and_is_named_where_it_is_read(client, lock, caplog):
    answer = client.ask()
    assert (answer["status"], answer["store"]) == ("completed", False)
    assert caplog.messages == ["a response was not stored: database is locked"]
    for call in (client.owned.get, client.owned.delete, client.owned.conversation):
        with pytest.raises(StoreError, match=r"^database is locked$"):
            call("resp_1")


def test_a_locked_file_is_waited_for_once_and_tried_again_later(client, lock, monkeypatch):
    assert not client.owned.save(entry("resp_2"))
    lock.execute("ROLLBACK")
    assert not client.owned.save(entry("resp_3")), "each try could stop the event loop for a second"
    monkeypatch.setattr(response_store, "RETRY_S", 0)
    assert client.owned.save(entry("resp_4")) and client.has("resp_1")


def test_a_file_that_was_removed_is_made_again(client, tmp_path):
    first = client.ask()["id"]
    (tmp_path / "responses").unlink()
    second = client.ask()["id"]
    assert client.stored(second)
    assert client.error(previous_response_id=first).code == "previous_response_not_found"


# What is stored


def test_a_response_is_stored_unless_the_request_or_the_setting_says_no(client, tmp_path):
    for body in ({}, {"store": None}, {"store": True}):
        answer = client.ask(**body)
        assert answer["store"] is True and client.stored(answer["id"]) == answer
    answer = client.ask(store=False)
    assert answer["store"] is False
    with pytest.raises(ApiError):
        client.stored(answer["id"])
    off = Client(ResponseStore(tmp_path / "none", 0))
    assert off.ask(store=True)["store"] is False
    assert not (tmp_path / "none").exists()


def test_ids_do_not_follow_from_the_id_of_the_request(client):
    answers = [client.ask(CALL, tools=TOOLS) for _ in range(2)]  # written() gives both the same x-request-id
    ids = [id for answer in answers for id in (answer["id"], answer["output"][0]["id"])]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"(resp|fc)_[0-9a-f]{32}(_0)?", id) for id in ids)


def test_a_response_that_the_limit_of_tokens_cuts_is_stored_too(client):
    answer = client.ask("Yes", "length")
    assert client.stored(answer["id"])["status"] == "incomplete"
    assert "a:Yes;u:More;" in client.prompt(input="More", previous_response_id=answer["id"])


# previous_response_id


def test_a_conversation_goes_on_from_a_response(client):
    first = client.ask("One", input="Hi", instructions="Be brief", tools=TOOLS)
    second = client.ask("Two", input=[{"role": "user", "content": "More"}], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    said = [("user", "Hi"), ("assistant", "One"), ("user", "More"), ("assistant", "Two"), ("user", "Last")]
    history = [{"role": role, "content": content} for role, content in said]
    assert client.prompt(input="Last", previous_response_id=second["id"]) == client.prompt(input=history)
    new = {"instructions": "Be long"}
    assert client.prompt(input="Last", previous_response_id=second["id"], **new) == client.prompt(input=history, **new)


def test_the_result_of_a_call_is_enough_to_go_on(client):
    first = client.ask(CALL, tools=TOOLS)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    history = [{"role": "user", "content": "Hi"}, call, result]
    assert client.prompt(input=[result], previous_response_id=first["id"]) == client.prompt(input=history)


def test_errors_name_the_items_of_the_client(client):
    first = client.ask()
    error = client.error(input=[{"role": "user"}], previous_response_id=first["id"])
    assert error.param == "input[0]" and "`content`" in str(error)


def test_a_conversation_whose_beginning_is_gone_says_so(client):
    first = client.ask()
    second = client.ask(previous_response_id=first["id"])
    client.owned.delete(first["id"])
    error = client.error(previous_response_id=second["id"])
    assert (error.status, error.param, error.code) == (422, "previous_response_id", "previous_response_not_found")
    assert f"`previous_response_id` continues {first['id']}, which was not found: " in str(error)
    assert str(error).endswith(f"Given: '{second['id']}'")


def test_log_probabilities_are_stored_but_not_part_of_a_conversation(client):
    answer = client.ask("Yes" * 10, top_logprobs=2)
    assert len(client.stored(answer["id"])["output"][0]["content"][0]["logprobs"]) == 30
    short = Client(client.store, max_bytes=500)
    assert short.prompt(previous_response_id=answer["id"]), "with their 2,000 bytes it would be too long"


# item_reference


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("answer", ["Yes", CALL, PATCH, f"Let me see{CALL}{PATCH}"], ids=["text", "call", "patch", "all"])
def test_a_reference_is_the_item_itself(client, answer, streams):
    made = client.ask(answer, tools=TOOLS, stream=streams)
    if streams:
        made = json.loads(made.splitlines()[-2].removeprefix("data: "))["response"]
    references = [{"type": "item_reference", "id": item["id"]} for item in made["output"]]
    untyped = [{"id": item["id"]} for item in made["output"]]
    user = {"role": "user", "content": "Hi"}
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "x"}
        for item in made["output"]
        if "call_id" in item
    ]
    expected = client.prompt(input=[user, *made["output"], *results, user], tools=TOOLS)
    for items in (references, untyped):
        assert client.prompt(input=[user, *items, *results, user], tools=TOOLS) == expected
    again = client.ask(input=[user, *references, *results, user], tools=TOOLS)
    client.owned.delete(made["id"])
    assert "Hi" in client.prompt(previous_response_id=again["id"]), "what it referred to is stored with it"


def test_a_reference_to_reasoning_is_the_reasoning(client, monkeypatch):
    id = f"rs_{'0' * 32}_0"
    reasoning = {"type": "reasoning", "id": id, "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    owner = client.owned
    owner.save(StoredResponse(f"resp_{'0' * 32}", None, b"[]", json.dumps([reasoning]).encode(), b"{}"))
    rendered = record_renders(monkeypatch)
    for item in ({"id": id}, reasoning):
        client.prompt(input=[item])
    assert rendered[0] == rendered[1] and "Hm" in str(rendered)


@pytest.mark.parametrize("id", ["msg_1", "", "_", "resp_x", f"msg_{'0' * 32}_0", "'; DROP TABLE responses"])
def test_a_reference_to_what_is_not_stored_says_what_to_do(client, id):
    error = client.error(input=[{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": id}])
    assert (error.status, error.param) == (422, "input[1].id")
    for words in ("a replica knows only its own", "--response-store-size", "send the items themselves, with `store: false`"):
        assert words in str(error)


def test_a_reference_cannot_make_a_short_request_long(client):
    (item,) = client.ask()["output"]
    error = client.error(input=[{"id": item["id"]}] * 2)
    assert error.param == "input[1].id" and "second time" in str(error)


def test_stored_items_count_like_those_that_a_request_sends(client):
    first = client.ask(input="x" * 3000)
    second = client.ask(input="y" * 3000, previous_response_id=client.ask()["id"])
    assert client.error(input=[{"id": 5}]).param == "input[0].id"
    assert client.prompt(previous_response_id=first["id"])
    third = client.ask("z" * 99, previous_response_id=second["id"])
    small = Client(client.store, max_bytes=4000)
    assert small.prompt(previous_response_id=first["id"])
    error = Client(client.store, max_bytes=3200).error(previous_response_id=third["id"])
    assert error.param == "previous_response_id" and "--payload-limit" in str(error)
    error = Client(client.store, max_bytes=100).error(input=[{"id": third["output"][0]["id"]}])
    assert error.param == "input[0].id" and "more than 100 bytes" in str(error)


# Keys


def test_another_key_reads_nothing_and_cannot_tell_that_it_is_there(client):
    answer = client.ask()
    other = Client(client.store, b"other")
    unknown = answer["id"].replace(answer["id"][5:], "0" * 32)
    for ask in (
        lambda id: other.error(previous_response_id=id),
        lambda id: other.error(input=[{"id": id.replace("resp", "msg") + "_0"}]),
    ):
        messages = [str(ask(id)).replace(id[5:], "?") for id in (answer["id"], unknown)]
        assert messages[0] == messages[1]
    for call in (OwnedResponses.get, OwnedResponses.delete):
        with pytest.raises(ApiError) as refused:
            call(other.owned, answer["id"])
        assert refused.value.status == 404
    assert client.stored(answer["id"]) == answer


def test_keys_are_not_in_the_file(client, tmp_path):
    Client(client.store, b"a-secret-key").ask()
    with sqlite3.connect(tmp_path / "responses") as database:
        (owner,) = database.execute("SELECT owner FROM responses").fetchone()
    assert len(owner) == 32 and b"a-secret-key" not in (tmp_path / "responses").read_bytes()


# The routes


def test_a_stored_response_can_be_read_and_deleted(served):
    answer = whole(served, RESPONSES, BODY)
    route = f"{RESPONSES}/{answer['id']}"
    found = served.client.get(route)
    assert (found.status_code, found.json, found.content_type) == (200, answer, "application/json")
    assert served.client.get(f"{route}?stream=false").json == answer
    refused = served.client.get(f"{route}?stream=true")
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "stream")
    gone = served.client.delete(route)
    assert (gone.status_code, gone.json) == (200, {"id": answer["id"], "object": "response.deleted", "deleted": True})
    for unknown in (served.client.get(route), served.client.delete(route)):
        error = unknown.json["error"]
        assert (unknown.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
        assert f"Response with id '{answer['id']}' was not found: a replica knows only its own" in error["message"]


def test_the_input_of_a_response_cannot_be_listed_and_the_response_is_not_said_to_be_missing(served):
    answer = whole(served, RESPONSES, BODY)
    for id in (answer["id"], "resp_other"):
        refused = served.client.get(f"{RESPONSES}/{id}/input_items?order=asc")
        assert (refused.status_code, refused.json["error"]["code"]) == (404, "not_found")
        assert "input items of a response cannot be listed" in refused.json["error"]["message"]


def test_a_streamed_response_is_there_when_its_last_event_is(served):
    with served.post(RESPONSES, BODY | {"stream": True}) as response:
        for event in response.response:
            if event.startswith(b"event: response.incomplete\n"):
                last = json.loads(event.splitlines()[1].removeprefix(b"data: "))["response"]
                assert served.client.get(f"{RESPONSES}/{last['id']}").json == last
                break
        else:
            raise AssertionError("it has no last event")
    more = whole(served, RESPONSES, BODY | {"previous_response_id": last["id"]})
    assert more["usage"]["input_tokens"] > last["usage"]["input_tokens"] + len("u:Hi;")


def test_a_response_is_that_of_the_key_that_asked_for_it(serve, tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n")
    served = serve(api_key_file=str(tmp_path / "keys")).get_ready()
    made = served.post(RESPONSES, BODY, headers={"Authorization": "Bearer one"}).json
    for headers, status in (
        ({"Authorization": "Bearer two"}, 404),
        ({"Authorization": "Bearer two", "x-api-key": "one"}, 200),
        ({"Authorization": "Bearer one"}, 200),
        ({}, 401),
    ):
        assert served.client.get(f"{RESPONSES}/{made['id']}", headers=headers).status_code == status


def test_without_a_store_what_needs_one_says_which_setting_is_off(serve):
    served = serve(response_store_size=0).get_ready()
    answer = whole(served, RESPONSES, BODY | {"store": True})
    assert answer["store"] is False
    error = served.client.get(f"{RESPONSES}/{answer['id']}")
    assert error.status_code == 404 and "--response-store-size (RESPONSE_STORE_SIZE) is 0" in error.json["error"]["message"]
    error = refusal(served, RESPONSES, BODY | {"previous_response_id": answer["id"]})
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "--response-store-size (RESPONSE_STORE_SIZE) is 0" in error["message"]
    assert served.client.delete(f"{RESPONSES}/{answer['id']}").status_code == 404


def test_a_damaged_store_is_named_to_those_who_read_and_stops_no_other(served, caplog):
    answer = whole(served, RESPONSES, BODY)
    route = f"{RESPONSES}/{answer['id']}"
    continued = BODY | {"previous_response_id": answer["id"]}
    referred = BODY | {"input": [{"id": answer["output"][0]["id"]}]}
    (served.folder / "responses").write_text("no database " * 1000)
    asked = [served.client.get(route), served.client.delete(route)]
    asked += [served.post(RESPONSES, body) for body in (continued, continued | {"stream": True}, referred)]
    for found in asked:
        error = found.json["error"]
        assert (found.status_code, error["type"], error["code"]) == (503, "server_error", "unavailable")
        assert error["message"].startswith("The stored responses cannot be used now: file is not a database")
        assert found.headers["Retry-After"] == "30"
    lines = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert {line.getMessage() for line in lines} == {"stored responses cannot be used: file is not a database"}
    assert len(lines) == 5 and not any(line.exc_info for line in lines)
    assert whole(served, RESPONSES, BODY)["store"] is False
