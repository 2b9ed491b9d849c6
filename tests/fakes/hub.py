"""A hub in a thread: repositories given as folders, served over HTTP as the real one serves them, and faults on demand.

What the real one does is done here: a private repository and one that does not exist look the same, a revision may be a
branch, a tag or a commit, and weights are redirected to another host, which must not see the token.
"""

import contextlib
import hashlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub.utils import _http

forget_connections = getattr(_http, "close_session", None) or _http.reset_sessions  # the latter in 0.36
READER, STRANGER = "hf_ThisOneMayReadEverything", "hf_ThisOneHasNoAccess"  # the tokens that it knows
LARGE = (".safetensors", ".bin", ".neff")  # kept apart from the repository, on the other host
WAIT_S = 60


@dataclass
class Repository:
    access: str  # public, private or gated
    revisions: dict[str, str] = field(default_factory=dict)  # the commit of each branch and tag
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of each commit


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    host: str
    token: str | None
    file: str | None  # whose content is asked for


@dataclass
class Fault:
    """What happens to the content of a file: status 500; "cut" or "reset" in the middle; or "hang" until it may go on."""

    file: str
    kind: str
    times: int


class Hub:
    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.status: int | None = None  # what everything is answered with, if anything
        self.hangs, self.may_go_on = threading.Event(), threading.Event()
        self.broken: list[BaseException] = []  # bugs of this file
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub")
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        assert not self.broken

    def close(self):
        """From here on nobody answers."""
        self.may_go_on.set()
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()

    def push(self, model_id, files, branch="main", tag=None, access="public"):
        """A commit with these files: a folder, or contents by path. Returns its id."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        repository = self.repositories.setdefault(model_id, Repository(access))
        content = "".join(f"{path} {hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(files.items()))
        commit = hashlib.sha1(f"{model_id} {len(repository.commits)}\n{content}".encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.revisions |= {name: commit for name in (branch, tag) if name}
        return commit

    def fail(self, file, kind, times=1):
        self.faults.append(Fault(file, kind, times))

    @property
    def fetched(self):
        """The names of the files whose content was asked for, each once, sorted."""
        return sorted({asked.file for asked in self.asked if asked.file and asked.method == "GET"})

    def environment(self, folder, **more):
        """For a process that is to use this hub and nothing of this machine."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        } | more


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request, client_address):
        import sys

        error = sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1]
        if not isinstance(error, ConnectionError):  # a client that went away
            self.hub.broken.append(error)


class Refused(Exception):
    def __init__(self, status, code=None, message=None, **headers):
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.close_connection = True
        hub = self.server.hub
        split = urlsplit(self.path)
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        is_other_host = self.headers["Host"].startswith("localhost")
        file = None
        if is_other_host:
            file = parse_qs(split.query)["name"][0]
        elif parts[2:3] == ["resolve"]:
            file = "/".join(parts[4:])
        hub.asked.append(Asked(self.command, self.path, self.headers["Host"], token, file))
        try:
            if hub.status:
                raise Refused(hub.status, message="on demand")
            if is_other_host:
                self.send_large(parts, file)
            elif parts[:2] == ["api", "models"] and len(parts) in (4, 6):
                self.send_api("/".join(parts[2:4]), *parts[4:], token=token)
            elif file:
                self.send_small("/".join(parts[:2]), parts[3], file, token)
            else:
                raise Refused(404)
        except Refused as refused:
            self.send(refused.status, b'{"error": "no"}', **refused.headers)

    do_HEAD = do_GET

    def find(self, model_id, revision, token):
        """The commit, and its files."""
        if token not in (None, READER, STRANGER):
            raise Refused(401, message="Invalid credentials in Authorization header")
        repository = self.server.hub.repositories.get(model_id)
        if repository is None or (repository.access == "private" and token != READER):
            raise Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.access == "gated" and token != READER:
            raise Refused(403 if token else 401, "GatedRepo", f"Access to model {model_id} is restricted.")
        if repository.access == "forbidden" and token != READER:
            raise Refused(403, message="the token lacks a permission")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def send_api(self, model_id, kind="revision", revision="main", token=None):
        commit, files = self.find(model_id, revision, token)
        if kind == "tree":
            told = [_entry(path, data) for path, data in sorted(files.items())]
            told += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(_folders(files))]
        else:
            siblings = [{"rfilename": path} for path in sorted(files)]
            told = {"_id": "0", "id": model_id, "modelId": model_id, "sha": commit, "siblings": siblings, "tags": []}
        self.send(200, json.dumps(told).encode(), **{"Content-Type": "application/json"})

    def send_small(self, model_id, revision, file, token):
        commit, files = self.find(model_id, revision, token)
        if file not in files:
            raise Refused(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        data = files[file]
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if file.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            place = f"http://localhost:{self.server.hub.port}/{model_id}/{commit}?name={file}&signature=secret"
            self.send(302, b"", **headers, **{"X-Linked-ETag": f'"{digest}"', "Location": place})
        else:
            self.send_content(data, file, headers | {"ETag": f'"{_blob_id(data)}"'})

    def send_large(self, parts, file):
        data = self.server.hub.repositories["/".join(parts[:2])].commits[parts[2]][file]
        self.send_content(data, file, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def send_content(self, data, file, headers):
        hub, fault = self.server.hub, None
        if self.command == "GET":
            fault = next((fault for fault in hub.faults if fault.file == file and fault.times > 0), None)
        if fault:
            fault.times -= 1
            if fault.kind == "error":
                raise Refused(500)
        status, start = 200, 0
        if wanted := self.headers.get("Range"):
            status, start = 206, int(wanted.removeprefix("bytes=").partition("-")[0])
            headers = headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self.send(status, data[start:], fault.kind if fault else None, **headers)

    def send(self, status, data, fault=None, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "Connection": "close"} | headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = 0 if fault is None else len(data) // 2
        self.wfile.write(data[:half])
        if fault == "hang":
            self.server.hub.hangs.set()
            self.server.hub.may_go_on.wait(WAIT_S)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if fault in ("cut", "reset"):
            raise ConnectionError
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data[half:])


def _blob_id(data):
    """As git computes it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path, data):
    entry = {"type": "file", "oid": _blob_id(data), "size": len(data), "path": path}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _folders(files):
    return {str(parent) for path in files for parent in Path(path).parents} - {"."}
