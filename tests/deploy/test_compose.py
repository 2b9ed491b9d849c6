"""deploy/compose.yaml: what it says is valid, and its HAProxy, as it is configured there, in front of two real servers."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import yaml
from processes import WAIT_S, Server, free_port, wait_until

from run import HERE

DEPLOY = HERE / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
LONG = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
STEP_MS = "20"  # of a simulated device, whose tokens take their time on any machine, and no processor
SHORT = {"prompt": "Hello", "max_tokens": 3}


def load(path):
    return yaml.safe_load(path.read_text())


def check(path):
    """Compose's own schema says whether a file is valid, and what is not."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("path", [COMPOSE, DEPLOY / "compose" / "neuron.yaml"], ids=lambda path: path.name)
def test_a_compose_file_is_valid(path):
    assert check(path) == (0, "ok -- validation done\n")


def mounts(service):
    return dict(volume.split(":")[:2] for volume in service.get("volumes", []))


def test_each_file_that_is_mounted_exists_and_each_volume_is_declared():
    compose = load(COMPOSE)
    sources = {source for service in compose["services"].values() for source in mounts(service)}
    assert {source for source in sources if not (DEPLOY / source).is_file()} == set(compose["volumes"])


def test_no_service_can_take_all_memory_of_the_machine():
    assert all(service["mem_limit"] for service in load(COMPOSE)["services"].values())


def test_the_server_reads_its_keys_from_the_file_that_is_mounted_if_there_is_one():
    compose = load(COMPOSE)
    server = compose["services"]["server"]
    (secret,) = server["secrets"]
    assert compose["secrets"][secret]["file"] == "${API_KEY_FILE:-/dev/null}"
    assert server["environment"]["API_KEY_FILE"] == f"${{API_KEY_FILE:+/run/secrets/{secret}}}"


def test_the_proxy_gets_each_variable_of_its_configuration():
    variables = re.findall(r"\$\{(\w+)\}", (DEPLOY / "compose" / "haproxy.cfg").read_text())
    assert set(variables) == set(load(COMPOSE)["services"]["proxy"]["environment"])


def test_each_version_is_exact_and_gradio_that_of_the_extra():
    services = load(COMPOSE)["services"]
    dockerfile = services.pop("gradio")["build"]["dockerfile_inline"]
    extra = re.search(r"^ui = \[(.*?)^\]", (HERE / "pyproject.toml").read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    assert sorted(re.findall(r"\S+==\S+", dockerfile)) == sorted(re.findall(r'"(.*?)"', extra))
    for name, service in services.items():
        if name != "server":
            assert re.fullmatch(r"[a-z./-]+:v?\d+\.\d+\.\d+(-alpine)?(@sha256:[0-9a-f]{64})?", service["image"]), name


def test_what_grafana_provisions_is_where_it_is_mounted():
    compose = load(COMPOSE)
    grafana = mounts(compose["services"]["grafana"])
    (provider,) = load(DEPLOY / "compose" / "dashboards.yaml")["providers"]
    board = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert grafana["./helm/grafana-dashboard.json"] == board
    assert os.path.dirname(board) == provider["options"]["path"]
    (source,) = load(DEPLOY / "compose" / "grafana.yaml")["datasources"]
    assert source["isDefault"], "the board's variable chooses the default"
    scraped = {job["job_name"] for job in load(DEPLOY / "compose" / "prometheus.yml")["scrape_configs"]}
    assert scraped | {re.match(r"http://(\w+):9090", source["url"])[1]} <= set(compose["services"])


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian's package prometheus)")
def test_prometheus_takes_its_configuration(tmp_path):
    for source, target in mounts(load(COMPOSE)["services"]["prometheus"]).items():
        if target.startswith("/etc/prometheus/"):
            shutil.copy(DEPLOY / source, tmp_path / os.path.basename(target))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Names(threading.Thread):
    """A DNS server that answers each question for IPv4 with `addresses`, as Docker's does for the name of a service."""

    def __init__(self, addresses):
        super().__init__(daemon=True)
        self.addresses = addresses
        self.own_address = f"127.0.{1 + secrets.randbelow(250)}.53"  # port 53, also when tests run side by side
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((self.own_address, 53))

    def run(self):
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                query, client = self.socket.recvfrom(512)
                end = query.index(b"\0", 12) + 5
                addresses = self.addresses if query[end - 4 : end - 2] == b"\0\1" else []
                answer = query[:2] + b"\x81\x80\0\1" + len(addresses).to_bytes(2, "big") + bytes(4) + query[12:end]
                for address in addresses:
                    answer += b"\xc0\x0c\0\1\0\1" + (1).to_bytes(4, "big") + b"\0\4" + socket.inet_aton(address)
                self.socket.sendto(answer, client)


def client_closed(response):
    response.connection.close()
    response.close()


def is_whole(stream):
    try:
        return stream.read().endswith(b"data: [DONE]\n\n")
    except http.client.IncompleteRead:
        return False


@contextlib.contextmanager
def asking(server):
    """One short request after the other, meanwhile; a list of their statuses."""
    statuses, ended, body = [], threading.Event(), json.dumps(SHORT).encode()

    def ask():
        while not ended.is_set():
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
                client.putrequest("POST", "/v1/completions")
                client.putheader("Content-Type", "application/json")
                client.putheader("Content-Length", str(len(body)))
                client.endheaders()
                time.sleep(0.01)  # two packets, as on a network: the proxy has to wait for the second one
                client.send(body)
                statuses.append(client.getresponse().status)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


needs_haproxy = pytest.mark.skipif(
    not shutil.which("haproxy")
    or subprocess.run(["unshare", "--mount", "mount", "--bind", "/etc", "/etc"], capture_output=True).returncode != 0,
    reason="needs haproxy (Debian's package), and root with unshare for a resolv.conf",
)


class Replicas:
    """Two servers at one port of two addresses, their name, and the proxy in front of them."""

    def __init__(self, stack, tmp_path, model):
        self._stack, self._port = stack, str(free_port())
        self._device = {
            "MODEL_ID": str(model),
            "DEVICE": "neuron",
            "MAX_TOTAL_TOKENS": "4096",
            "NEURON_RT_NUM_CORES": "2",
            "NEURON_COMPILE_CACHE_URL": str(tmp_path / "programs"),
            "PYTHONPATH": str(HERE / "bench" / "simulated"),
            "SIMULATED_STEP_MS": STEP_MS,
        }
        self.servers = [self.start("127.0.0.2"), self.start("127.0.0.3")]
        self.names = Names(["127.0.0.2", "127.0.0.3"])
        stack.callback(self.names.socket.close)
        self.names.start()
        self._resolv_conf = tmp_path / "resolv.conf"
        self._resolv_conf.write_text(f"nameserver {self.names.own_address}\n")
        for server in self.servers:
            server.wait_ready()  # the proxy counts what it has not asked yet as ready
        self.proxy = self.start_proxy()

    def start(self, address):
        settings = {"HOSTNAME": address, "PORT": self._port, "MAX_CONCURRENT_REQUESTS": "4", "MAX_BATCH_SIZE": "4"}
        return self._stack.enter_context(Server(**settings | self._device))

    def start_proxy(self):
        command = f"mount --bind {self._resolv_conf} /etc/resolv.conf && exec haproxy -f {DEPLOY}/compose/haproxy.cfg"
        settings = {"SERVERS": f"server:{self._port}", "METRICS_PORT": str(free_port())}
        return self._stack.enter_context(Server(command=("unshare", "--mount", "sh", "-c", command), **settings))

    def wait_ready(self, count=2):
        """Waits until the proxy counts that many servers as ready."""
        url = f"http://127.0.0.1:{self.proxy.environment['METRICS_PORT']}"

        def counted():
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics?scope=backend") as metrics:
                return f'haproxy_backend_active_servers{{proxy="servers"}} {count}\n' in metrics.read().decode()

        wait_until(counted, f"{count} servers ready; log so far:\n{self.proxy.log}")
        return self

    def running(self):
        """How many requests each server runs."""
        return [server.status().running for server in self.servers]

    def stream(self, **fields):
        response = self.proxy.request("POST", "/v1/completions", LONG | {"stream": True} | fields)
        assert response.status == 200, response.read()
        return response


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE / "bench")
        from devices import LLAMA_2_7B, write_model

        yield Replicas(stack, folder, write_model(folder / "model", LLAMA_2_7B))


@pytest.fixture
def replicas(two_servers):
    two_servers.wait_ready()
    yield two_servers
    for server in two_servers.servers:
        server.wait_idle()


@needs_haproxy
@pytest.mark.processes
def test_streams_come_token_by_token_from_the_server_with_the_fewest(replicas):
    def begin():
        """A new stream and the server that runs it."""
        before = replicas.running()
        stream = replicas.stream()
        assert stream.readline().startswith(b"data: {"), "a token comes while the others are generated"
        return stream, [after > had for after, had in zip(replicas.running(), before)].index(True)

    streams = [begin() for _ in range(4)]
    assert replicas.running() == [2, 2]
    for stream, server in streams:
        if server == 0:
            client_closed(stream)
    wait_until(lambda: replicas.running() == [0, 2], "disconnects reach their server")
    streams += [begin(), begin()]
    assert replicas.running() == [2, 2]
    for stream, _ in streams:
        client_closed(stream)


@needs_haproxy
@pytest.mark.processes
def test_a_disconnect_before_the_response_reaches_the_server(replicas):
    client = http.client.HTTPConnection("127.0.0.1", replicas.proxy.port)
    client.request("POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"})
    wait_until(lambda: sum(replicas.running()) == 1, "the request runs")
    client.close()
    wait_until(lambda: sum(replicas.running()) == 0, "the disconnect reaches its server")


@needs_haproxy
@pytest.mark.processes
def test_a_refusal_is_passed_on_unchanged(replicas):
    streams = [replicas.stream() for _ in range(8)]
    wait_until(lambda: replicas.running() == [4, 4], "both are full")
    answers = []
    for host, port in (("127.0.0.1", replicas.proxy.port), ("127.0.0.2", replicas.servers[0].port)):
        with contextlib.closing(http.client.HTTPConnection(host, port)) as client:
            client.request("POST", "/v1/completions", json.dumps(SHORT), {"Content-Type": "application/json"})
            answer = client.getresponse()
            answers.append((answer.status, answer.headers["Retry-After"], answer.headers["Content-Type"], answer.read()))
    assert answers[0] == answers[1]
    assert answers[0][:2] == (429, "1")
    for stream in streams:
        client_closed(stream)


@needs_haproxy
@pytest.mark.processes
def test_no_request_is_lost_to_a_server_that_stops(replicas):
    with asking(replicas.proxy) as statuses:
        streams = [replicas.stream(max_tokens=150), replicas.stream(max_tokens=150)]
        stopped = replicas.servers[0]
        stopped.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert stopped.wait_exit() == 0
        replicas.wait_ready(1)
        replicas.servers[0] = replicas.start("127.0.0.2")
        replicas.wait_ready(2)
    assert set(statuses) == {200} and len(statuses) > 5


@needs_haproxy
@pytest.mark.processes
def test_a_request_whose_server_dies_is_sent_to_the_other(replicas):
    # Twenty seconds, so that all four still run when a busy machine has started the last.
    streams, whole = [replicas.stream(max_tokens=1000), replicas.stream(max_tokens=1000)], []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in range(2):  # one after the other, so that each server gets one
            whole.append(pool.submit(replicas.proxy.post, "/v1/completions", LONG | {"max_tokens": 700}))
            wait_until(lambda: sum(replicas.running()) == 2 + len(whole), "the request runs")
        assert replicas.running() == [2, 2]
        with asking(replicas.proxy) as statuses:
            wait_until(lambda: statuses, "an answer")
            replicas.servers[0].process.kill()
            assert [done.result()["usage"]["completion_tokens"] for done in whole] == [700, 700]
            assert sorted(is_whole(stream) for stream in streams) == [False, True]
            replicas.servers[0] = replicas.start("127.0.0.2")
            replicas.wait_ready()
    assert set(statuses) == {200}


@needs_haproxy
@pytest.mark.processes
def test_a_server_that_leaves_the_name_finishes_and_one_that_joins_is_found(replicas):
    streams = [replicas.stream(max_tokens=300), replicas.stream(max_tokens=300)]
    left = replicas.names.addresses.pop()
    replicas.wait_ready(1)
    assert [is_whole(stream) for stream in streams] == [True, True]
    replicas.names.addresses.append(left)
    replicas.wait_ready(2)


@needs_haproxy
@pytest.mark.processes
def test_the_proxy_finishes_what_runs_when_it_is_stopped(replicas):
    proxy = replicas.proxy
    stream = replicas.stream(max_tokens=150)
    proxy.process.send_signal(signal.SIGUSR1)  # compose.yaml: stop_signal
    assert is_whole(stream)
    proxy.process.wait(WAIT_S)  # its exit code is that of a crash with the 2.6.12 of Debian 12, which has nothing left to do
    replicas.proxy = replicas.start_proxy()


@needs_haproxy
def test_without_a_server_the_answer_is_json():
    settings = {"SERVERS": "localhost:1", "METRICS_PORT": str(free_port())}
    with Server(command=("haproxy", "-f", f"{DEPLOY}/compose/haproxy.cfg"), **settings) as proxy:
        answer = wait_until(lambda: answered(proxy), "an answer")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert json.loads(answer.read()) == {"error": "No server is ready", "error_type": "unavailable"}


def answered(server):
    with contextlib.suppress(ConnectionRefusedError):
        return server.request("GET", "/health")
