"""What SageMaker puts between a caller and the container, as far as boto3 sees it: its URLs, its errors, its event stream.

    POST /endpoints/NAME/invocations                     the container's answer, as it is
    POST /endpoints/NAME/invocations-response-stream     the same, piece by piece, each a PayloadPart event

Whatever the container refuses is a ModelError. Pieces are cut without regard to lines, as SageMaker's are.
Source of the framing: the AWS event stream encoding (smithy.io, "Amazon Event Stream Specification").
"""

import contextlib
import http.client
import json
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE_BYTES = 100  # less than most events have: what reads them must put lines together again
STRING = 7  # the type of a header's value
PASSED_ON = ("Content-Type", "Accept", "X-Amzn-SageMaker-Custom-Attributes")  # Authorization does not reach the container


@contextlib.contextmanager
def shim(container_port):
    """The URL of a shim in front of the container at that port."""
    handler = type("Handler", (_Handler,), {"container_port": container_port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    container_port: int

    def do_POST(self):
        _, endpoints, _name, action = self.path.split("/")
        assert endpoints == "endpoints" and action in ("invocations", "invocations-response-stream"), self.path
        body = self.rfile.read(int(self.headers["Content-Length"]))
        container = http.client.HTTPConnection("127.0.0.1", self.container_port, timeout=60)
        with contextlib.closing(container):
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            container.request("POST", "/invocations", body, headers)
            answer = container.getresponse()
            if answer.status >= 400:
                told = answer.read().decode()
                message = f"Received client error ({answer.status}) from primary with message {told!r}"
                self._refuse(424, "ModelError", Message=message, OriginalStatusCode=answer.status, OriginalMessage=told)
            elif action == "invocations":
                self._send(200, answer.read(), {"Content-Type": answer.headers["Content-Type"]})
            else:
                self._stream(answer)

    def log_message(self, *_):
        pass

    def _send(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status, kind, **what):
        self._send(status, json.dumps(what).encode(), {"Content-Type": "application/json", "x-amzn-ErrorType": kind})

    def _stream(self, answer):
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("X-Amzn-SageMaker-Content-Type", answer.headers["Content-Type"])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(PIECE_BYTES):
            event = payload_part(piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")


def payload_part(payload):
    """`payload` as one event: lengths, CRC32 of these, headers, payload, CRC32 of all before."""
    names = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    headers = b"".join(_header(name.encode(), value.encode()) for name, value in names.items())
    prelude = struct.pack("!II", 12 + len(headers) + len(payload) + 4, len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack("!I", zlib.crc32(message))


def _header(name, value):
    return struct.pack("!B", len(name)) + name + struct.pack("!BH", STRING, len(value)) + value
