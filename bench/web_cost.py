"""What the web side costs: its CPU time per streamed token, and the time that checking a request takes.

    .venv/bin/python bench/web_cost.py [PORT]

Starts the server with one web process and the demonstration model, streams answers of 200 tokens from 4 clients at a time,
and reads the CPU time of the web processes from /proc before and after. Five rounds: least, median and most.
"""

import concurrent.futures
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import schema  # noqa: E402
from config import DEMO_MODEL, Config  # noqa: E402
from protocol import Facts  # noqa: E402
from text import ChatTemplate, Tokenizer  # noqa: E402

ROUNDS, STREAMS, CLIENTS, TOKENS = 5, 8, 4, 200
QUESTION = "What is Deep Learning?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
NATIVE = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 50.0, "details": True}
KINDS = {
    "native": ("/generate_stream", {"inputs": QUESTION, "parameters": NATIVE}),
    "native, 5 top tokens": ("/generate_stream", {"inputs": QUESTION, "parameters": NATIVE | {"top_n_tokens": 5}}),
    "native, 4 stop strings": (
        "/generate_stream",
        {"inputs": QUESTION, "parameters": NATIVE | {"stop": ["never this", "nor that", "xyz", "\n\n\n"]}},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, 5 top log-probabilities": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
}


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def web_cpu_s(server):
    """CPU time of gunicorn's master and of its web process."""
    ticks = 0
    for pid in descendants(server.pid):
        if b"web.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def stream(port, path, body):
    """How many tokens a stream brought: one an event, the ends of chats apart."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    events = [line for line in response if line.startswith(b"data: {")]
    connection.close()
    return len(events)


def per_token_us(server, port, path, body):
    before = web_cpu_s(server)
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        tokens = sum(pool.map(lambda _: stream(port, path, body), range(STREAMS)))
    return (web_cpu_s(server) - before) / tokens * 1e6


def checking_ms():
    """Parsing and checking a request with a prompt of 1,000 tokens, tokenizing apart; and a chat, with its template."""
    tokenizer, template, config = Tokenizer(DEMO_MODEL), ChatTemplate.load(DEMO_MODEL), Config()
    facts = Facts("demo", None, str(DEMO_MODEL), 2048, [0], 4, 4095, 4096, "cpu", "float32", str(DEMO_MODEL))
    word = " deep"
    prompt = word * (1000 // len(tokenizer.encode(word)))
    native = json.dumps({"inputs": prompt, "parameters": {"temperature": 0.7, "top_p": 0.9, "stop": ["x"]}}).encode()
    chat = json.dumps({"messages": [{"role": "user", "content": prompt}], "logit_bias": {"5": 1}}).encode()
    ids = tokenizer.encode(prompt)

    def check_native():
        schema.fit(schema.check(schema.parse(native, schema.GenerateRequest), config, facts, False), ids, facts)

    def check_chat():
        request = schema.parse(chat, schema.ChatRequest)
        template.render(schema.messages_of(request.messages))
        schema.fit(schema.check_chat(request, config, facts), ids, facts)

    for name, check in (("native", check_native), ("chat, with its template", check_chat)):
        taken = []
        for _ in range(200):
            started_at = time.perf_counter()
            check()
            taken.append((time.perf_counter() - started_at) * 1e3)
        yield f"{name} ({len(ids)} tokens)", taken


def report(name, unit, values):
    print(f"{name:36} {min(values):8.3f} {statistics.median(values):8.3f} {max(values):8.3f} {unit}")


def main(port):
    print(f"{'':36} {'least':>8} {'median':>8} {'most':>8}")
    for name, taken in checking_ms():
        report(f"checking, {name}", "ms a request", taken)
    environment = os.environ | {"PORT": str(port), "WEB_CONCURRENCY": "1", "PYTHON": sys.executable, "LOG_LEVEL": "error"}
    server = subprocess.Popen([HERE / "entrypoint.sh", "serve"], env=environment)
    try:
        ready = False
        while not ready:
            assert server.poll() is None, "the server did not start"
            time.sleep(0.2)
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("GET", "/health")
                ready = connection.getresponse().status == 200
            except OSError:
                continue
        for path, body in KINDS.values():
            stream(port, path, body)
        for name, (path, body) in KINDS.items():
            report(name, "us of CPU a token", [per_token_us(server, port, path, body) for _ in range(ROUNDS)])
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8090)
