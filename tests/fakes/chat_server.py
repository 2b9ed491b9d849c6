"""A server of the page at `/` whose answers the test writes, piece by piece."""

import json
import queue
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from api.status import PAGE, PAGE_POLICY

TEXT_MODEL = 'data-model="local" data-context="512" data-precision="int8" data-device="cpu" data-sampling="host"'
CHAT_MODEL = TEXT_MODEL + ' data-chats="True"'
# Pages by name: what the server says about its model.
VARIANTS = {
    "page.html": CHAT_MODEL,
    "without-chats.html": TEXT_MODEL,
    "with-images.html": CHAT_MODEL + ' data-images="True"',
    "with-tools.html": CHAT_MODEL + ' data-tools="hermes"',
    "long-context.html": CHAT_MODEL.replace("512", "65536"),
    "with-key.html": CHAT_MODEL.replace("local", "&lt;b&gt;it&#39;s&lt;/b&gt; &quot;mine&quot;").replace("512", "4096")
    + ' data-key="True"',
    "on-device.html": CHAT_MODEL.replace("host", "device"),
    "preparing.html": 'data-preparing="some/model"',
}


class Answer:
    """The answer to a request of the page."""

    def __init__(self, path, body):
        self.path = path
        self.body = body
        self.status = 200  # set before the first piece
        self.pieces = queue.Queue()

    @property
    def asked(self):
        return [message["content"] for message in self.body["messages"]]

    def write(self, content=None, **delta):
        self._send({"choices": [{"delta": {"content": content} | delta}]})

    def write_text(self, text):
        self._send({"choices": [{"text": text}]})

    def end(self, tokens=2):
        self._send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._send({"choices": [], "usage": {"completion_tokens": tokens}})
        self.pieces.put(None)

    def fail(self, message):
        self._send({"error": {"message": message}})
        self.pieces.put(None)

    def refuse(self, status, message):
        self.status = status
        self.pieces.put(json.dumps({"error": {"message": message}}).encode())
        self.pieces.put(None)

    def _send(self, event):
        self.pieces.put(f"data: {json.dumps(event)}\n\n".encode())


class ChatServer(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/page.html"
        self.url_of = {name: f"http://127.0.0.1:{self.server_port}/{name}" for name in VARIANTS}
        self.answers = queue.Queue()  # to the requests, as they come
        self.health = {}  # what GET /health says: the server is not ready

    def __enter__(self):
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(SimpleHTTPRequestHandler):
    def __init__(self, *arguments):
        super().__init__(*arguments, directory=PAGE.parent)

    def end_headers(self):
        self.send_header("Content-Security-Policy", PAGE_POLICY)
        super().end_headers()

    def do_GET(self):
        name = self.path.strip("/")
        if name == "health":
            self._respond(503, json.dumps(self.server.health).encode())
        elif name in VARIANTS:
            self._respond(200, PAGE.read_bytes().replace(b"<body>", f"<body {VARIANTS[name]}>".encode()))
        else:
            super().do_GET()

    def _respond(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        answer = Answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.answers.put(answer)
        piece = answer.pieces.get()
        self.send_response(answer.status)
        self.end_headers()
        while piece:
            try:
                self.wfile.write(piece)
            except OSError:
                return  # the page has hung up
            piece = answer.pieces.get()

    def log_message(self, *_):
        pass
