"""openvino-genai's continuous batching behind HTTP, to compare with this server.

    pip install openvino-genai==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0
    python bench/genai.py FOLDER PORT int8|int4

Exports the checkpoint in FOLDER, then serves OpenAI's /v1/completions as a stream, greedy and without an end-of-text token,
with Python's own HTTP server: only what peers.py needs. Install it into an environment of its own.
"""

import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import openvino_genai


class Engine:
    """Runs steps while there are requests; a queue of token ids for each of them, None at the end."""

    def __init__(self, folder: str):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = 16
        scheduler.cache_size = 1  # gigabyte
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.arrivals = SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        live = []
        number = 0
        while True:
            while not live or not self.arrivals.empty():
                prompt, tokens, ids = self.arrivals.get()
                number += 1
                live.append((self.pipeline.add_request(number, prompt, asked(tokens)), ids))
            self.pipeline.step()
            for handle, ids in live:
                while handle.can_read():
                    for output in handle.read().values():
                        ids.put(output.generated_ids)
                if handle.get_status() == openvino_genai.GenerationStatus.FINISHED:
                    ids.put(None)
            live = [each for each in live if each[0].get_status() == openvino_genai.GenerationStatus.RUNNING]


def asked(tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        self.send_response(200)  # /health
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        ids = SimpleQueue()
        self.engine.arrivals.put((given["prompt"], given["max_tokens"], ids))
        tokens = 0
        while (found := ids.get()) is not None:
            tokens += len(found)
            self.send_event({"choices": [{"index": 0, "text": self.engine.tokenizer.decode(found)}]})
        self.send_event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"0\r\n\r\n")

    def send_event(self, body: dict) -> None:
        event = f"data: {json.dumps(body)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def log_message(self, *_) -> None:
        pass


def main(model: str, port: str, weight_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        command += ["--model", model, "--weight-format", weight_format]
        if weight_format == "int4":
            command += ["--group-size", "64"]  # divides SmolLM2's 576 columns
        subprocess.run([*command, folder], check=True)
        Handler.engine = Engine(folder)
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
