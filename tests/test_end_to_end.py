"""The whole server as its users meet it: real processes, real signals, real HTTP, the built-in model."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket

import pytest
from processes import Server, events, free_port, memory_mb, wait_until

from api.http.response_store import FILE
from config import DEMO_MODEL

pytestmark = pytest.mark.processes

QUESTIONS = ["What is Deep Learning?", "What is continuous batching?", "What is AWS Inferentia?", "Hello"]


@pytest.fixture(scope="module")
def server():
    with Server("--max-batch-size", "4", "--web-concurrency", "2") as server:
        yield server.wait_ready()
        assert server.stop() == 0


@pytest.fixture(autouse=True)
def nothing_is_left_over(request):
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()


def test_a_question_is_answered_and_the_answer_ends_by_itself(server):
    stream = server.stream("What is Deep Learning?", details=True)
    assert "learning" in stream[-1]["generated_text"].lower()
    assert stream[-1]["details"]["finish_reason"] == "eos_token"
    assert "".join(e["token"]["text"] for e in stream if not e["token"]["special"]) == stream[-1]["generated_text"]


def test_tokens_come_one_by_one_while_the_answer_is_written(server):
    long = {"ignore_eos": True, "max_tokens": 900}
    many = {"prompt": QUESTIONS * 2, "stream": True}  # so that some still run when one has looked
    response = server.request("POST", "/v1/completions", many | long)
    first = next(events(response))
    assert first["choices"][0]["finish_reason"] is None
    assert server.status().running > 0, "the first token is here while the request still runs"
    assert response.read().endswith(b"data: [DONE]\n\n")


def test_32_streams_on_4_slots_all_get_the_right_text(server):
    alone = {question: server.generate(question)[1]["generated_text"] for question in QUESTIONS}
    asked = QUESTIONS * 8
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda q: server.stream(q)[-1]["generated_text"], asked))
    assert answers == [alone[question] for question in asked]


def test_the_next_turn_of_a_chat_runs_only_what_is_new_and_says_so(server):
    body = {"messages": [{"role": "user", "content": "What is Deep Learning? And 5f2c?"}], "temperature": 0}
    cached = []
    for text in ("Tell me more.", "And then?", "Thanks."):
        answer = json.loads(server.request("POST", "/v1/chat/completions", body).read())
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        last = answer["usage"]["prompt_tokens"]
        body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": text}]
    assert cached[0] < cached[1] < cached[2] < last


def test_an_answer_that_the_client_predicts_is_the_same_and_takes_fewer_steps(server):
    body = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "temperature": 0, "max_tokens": 60}

    def answer(**more):
        steps = server.status().steps
        found = json.loads(server.request("POST", "/v1/chat/completions", body | more).read())
        accepted = found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        server.wait_idle()
        return found["choices"][0]["message"]["content"], accepted, server.status().steps - steps

    text, _, alone = answer()
    predicted, accepted, steps = answer(prediction={"type": "content", "content": text.replace("neural", "deep")})
    assert predicted == text and accepted > 20 and steps < alone / 2
    prediction = {"type": "content", "content": text}
    streamed = server.request("POST", "/v1/chat/completions", body | {"stream": True, "prediction": prediction})
    lines = streamed.read().decode().splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == text


def test_every_web_process_answers_and_none_carries_torch(server):
    master, *web = server.pids("web.py")
    assert len(web) == 2
    for pid in (master, *web):
        with open(f"/proc/{pid}/maps") as maps:
            assert "torch" not in maps.read()
        assert memory_mb(pid) < 150


def test_the_threads_of_a_web_process_share_two_heaps(server):
    """Else each heap keeps what the largest request in it has taken: 140 MB after two minutes of `make soak`, not 70."""
    for pid in server.pids("web.py"):
        with open(f"/proc/{pid}/environ") as environ:
            assert "MALLOC_ARENA_MAX=2" in environ.read().split("\0")


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_response_that_one_web_process_stores_is_known_to_the_other(server):
    _master, *web = server.pids("web.py")
    with stopped(web[0]):
        made = server.post("/v1/responses", {"input": QUESTIONS[0], "max_output_tokens": 3})
    with stopped(web[1]):
        assert json.loads(server.get(f"/v1/responses/{made['id']}")[1]) == made
        more = server.post("/v1/responses", {"input": "And?", "max_output_tokens": 3, "previous_response_id": made["id"]})
    with stopped(web[0]):
        assert server.request("DELETE", f"/v1/responses/{made['id']}").status == 200
    with stopped(web[1]):
        assert server.get(f"/v1/responses/{made['id']}")[0] == 404
    assert more["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    assert (server.run_dir / FILE).is_file(), "in the folder that is gone after the last test"


def test_every_web_process_tells_the_same_metrics(server):
    def count():
        text = wait_until(lambda: (answer := server.get("/metrics"))[0] == 200 and answer[1], "the metrics")
        return int(float(re.search(r"^tgi_request_success (\S+)$", text, flags=re.MULTILINE)[1]))

    before = count()
    for _ in range(6):  # each on a connection of its own, so that both web processes have some
        server.generate("Hello", max_new_tokens=1)
    wait_until(lambda: count() >= before + 6, "the count of all six")
    assert len({count() for _ in range(10)}) == 1
    model = json.loads(server.get("/info")[1])["model_id"]
    assert f'\nvllm:num_requests_running{{engine="0",model_name="{model}"}} 0.0\n' in server.get("/metrics")[1]


def test_chats_and_completions_in_a_crowd_say_what_they_say_alone(server):
    def ask(n):
        if n % 2:
            body = {"prompt": [QUESTIONS[0], "Hello"], "n": 2, "max_tokens": 12, "seed": n, "logprobs": 1, "echo": True}
            answer = server.post("/v1/completions", body)
            return [(choice["text"], choice["logprobs"]["tokens"]) for choice in answer["choices"]]
        message = {"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]}
        body = {"messages": [message], "max_tokens": 12, "seed": n, "stop": ["e"]}
        return server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    alone = [ask(n) for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert not any("e" in text for text in alone[::2])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /infer?sentence=" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 101 + b"\r\n", 431),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_http_or_too_much_of_it_is_refused(server, sent, status):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == status


def test_as_sagemaker_starts_it():
    """`serve` as argument, its names for the settings, its port, and no more."""
    port = str(free_port())
    settings = {"HF_MODEL_ID": str(DEMO_MODEL), "SM_NUM_GPUS": "1", "SAGEMAKER_BIND_TO_PORT": port, "PORT": port}
    with Server(**settings, ALLOWED_MEDIA_DOMAINS="example.com") as server:
        server.wait_ready()
        assert "--allowed-media-domains has no effect here" in server.log
        assert server.get("/ping") == (200, "")
        response = server.request("POST", "/invocations", {"inputs": QUESTIONS[0]})
        (answer,) = json.loads(response.read())
        assert answer["generated_text"].startswith(QUESTIONS[0])
        assert int(response.headers["x-generated-tokens"]) > 0
        assert server.stop() == 0


def test_each_finished_request_is_one_line_in_the_log(server):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
    server.request("POST", "/generate", body, **{"x-request-id": "mine"}).read()

    def lines():
        return [line for line in server.log.splitlines() if "request finished" in line and "request_id=mine " in line]

    (line,) = wait_until(lines, "the line")
    for name in (
        "input_tokens=",
        "generated_tokens=3",
        "queue_ms=",
        "prefill_ms=",
        "decode_ms=",
        "finish_reason=length",
    ):
        assert name in line


def test_sigterm_while_it_still_loads_ends_it_with_code_0():
    with Server() as server:
        wait_until(lambda: server.pids("worker.py"), "the worker")
        assert server.stop() == 0


def test_a_model_that_is_not_ready_in_time_is_given_up():
    with Server("--startup-timeout", "0.1") as server:
        assert server.wait_exit() == 1
        assert "--startup-timeout" in server.log


def test_json_logs_are_json_to_the_last_words_about_a_killed_worker():
    with Server("--json-output", "--log-level", "debug") as server:
        server.wait_ready()
        server.generate("ab", max_new_tokens=2)
        wait_until(lambda: "request finished" in server.log and "generation ends" in server.log, "the lines of the request")
        os.kill(server.pids("worker.py")[0], signal.SIGKILL)
        assert server.wait_exit() == 1
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"timestamp", "level", "target", "fields"} == set(lines[0])
    (finished,) = [line["fields"] for line in lines if line["fields"]["message"] == "request finished"]
    assert finished["generated_tokens"] == 2
    steps = [(line["target"], line["fields"]["message"]) for line in lines if finished["request_id"] in line["fields"].values()]
    assert [message for target, message in steps if target == "worker"] == [
        "request queued",
        "prompt begins",
        "first token",
        "request finished",
    ]
    assert [message for target, message in steps if target == "web"] == [
        "POST /generate",
        "sent to the worker",
        "generation ends",
        "response begins",
    ]
    assert "the worker process ended with code 137" in [line["fields"]["message"] for line in lines]


def refused(*arguments, **environment):
    """Starts a server that cannot be served. Returns the one line that says so, which is the last one."""
    with Server(*arguments, **environment) as server:
        assert server.wait_exit() == 2, server.log
        log = server.log
    assert "Traceback" not in log
    errors = [line for line in log.splitlines() if "error" in line.lower()]
    assert errors == log.splitlines()[-1:], log
    return errors[0]


def test_an_unknown_flag_names_the_nearest():
    assert "did you mean --max-batch-size?" in refused("--max-batch-sise", "3")


def test_a_port_in_use_is_refused():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        line = refused(PORT=str(taken.getsockname()[1]))
    assert "--port" in line
    assert "in use" in line


def test_no_room_for_what_is_compiled_is_refused(server, tmp_path):  # which has converted the model
    little = ("bash", "-c", "ulimit -f 16; PYTHONDONTWRITEBYTECODE=1 exec ./entrypoint.sh serve")  # 16 KB a file
    assert "set NUMBA_CACHE_DIR to another folder" in refused(command=little, NUMBA_CACHE_DIR=str(tmp_path))


def test_help_fits_a_terminal_and_starts_nothing():
    with Server("--help", COLUMNS="80") as server:
        assert server.wait_exit() == 0
        assert all(len(line) <= 80 for line in server.log.splitlines())
        assert "--max-batch-size" in server.log


def test_two_servers_on_one_machine_do_not_meet_and_a_killed_web_server_ends_its_own_with_1(server):
    with Server("--max-batch-size", "2") as other:
        other.wait_ready()
        assert json.loads(other.get("/info")[1])["max_batch_size"] == 2
        assert json.loads(server.get("/info")[1])["max_batch_size"] == 4
        os.kill(other.pids("web.py")[0], signal.SIGKILL)
        assert other.wait_exit() == 1
        assert server.get("/health")[0] == 200


def test_the_built_in_model_is_small():
    assert sum(f.stat().st_size for f in DEMO_MODEL.iterdir()) <= 8_000_000


def test_tools_are_described_to_a_model_whose_template_has_no_place_for_them_and_the_log_says_so_once(tmp_path):
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    (tmp_path / "mine.json").write_text(json.dumps({"chat_template": source}))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"enum": ["Oslo"]}}}}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": "required", "max_tokens": 60}
    with Server("--tokenizer-config-path", str(tmp_path / "mine.json"), WEB_CONCURRENCY="2") as server:
        server.wait_ready()
        (call,) = server.post("/v1/chat/completions", chat)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(server.get("/info")[1])["tool_parser"] == "hermes"
        wait_until(lambda: "no place for tools" in server.log, "the line")
        assert server.log.count("no place for tools") == 1
