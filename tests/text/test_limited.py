"""What runs in a child process with limits takes neither all time nor all memory, and harms nothing else."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Server, wait_until

from bench import hostile
from run import HERE
from text.limited import LimitExceeded, Rejected, SandboxedFunction

pytestmark = pytest.mark.processes

USER = {"role": "user", "content": "Is <b>1 < 2</b>?"}


def limited(characters=4_000_000, cpu_s=0.5, megabytes=256):
    """Renders templates: programs that do as much as a test wants."""
    return SandboxedFunction("text.template:renderer", [characters], cpu_s=cpu_s, memory_bytes=megabytes * 2**20)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Each would take seconds, hours or gigabytes, and some do all of it in one call of C code.
ATTACKS = hostile.TEMPLATES | {
    "map": "{% set r = range(99999) %}{{ ([r] * 99999) | map('sum') | list | length }}",
    "a recursive loop": "{% for a in [range(99999)] recursive %}{{ loop(a) if a is iterable }}{{ loop([a]) }}{% endfor %}",
    "two calls of itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a constant of the compiler's": "{% if not messages %}{{ 9 ** (9 ** 9) }}{% endif %}",
    "writing": "{% for _ in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
}
LIMITS = r"longer than 0\.5 s of processor time|more than 256 MiB of memory|maximum recursion depth exceeded|may not use"


def memory_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def children() -> set[int]:
    """The processes of this one that work within limits."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text().rsplit(") ", 1)[1].split()[:2]
            if int(parent) == os.getpid() and state != "Z" and b"text.limited" in (status.parent / "cmdline").read_bytes():
                found.add(int(status.parent.name))
    return found


@pytest.mark.parametrize("template", ATTACKS.values(), ids=ATTACKS)
def test_what_takes_all_time_or_memory_fails_and_nothing_else(template):
    render = limited()
    variables = {"messages": [USER], "n": 1}
    assert render(["{{ messages[0].content }}", variables]) == USER["content"]
    cpu_s, before_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, memory_kb()
    with pytest.raises((LimitExceeded, Rejected), match=LIMITS):
        render([template, variables])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - cpu_s < 2
    assert memory_kb() - before_kb < 20_000
    assert render(["{{ messages[0].content }}", variables]) == USER["content"]


def test_requests_without_an_end_leave_a_plain_one_its_answer():
    render = limited()
    with ThreadPoolExecutor(2) as threads:
        endless = [threads.submit(render, [ENDLESS, {}]) for _ in range(4)]
        plain = threads.submit(render, ["{{ 1 }}", {}])
    assert plain.result() == "1"
    assert all("longer than 0.5 s" in str(request.exception()) for request in endless)


def test_what_waits_without_taking_processor_time_ends_and_the_next_request_is_answered(monkeypatch):
    monkeypatch.setattr("text.limited.WALL_S", 3)
    run = SandboxedFunction("pkgutil:resolve_name", ["subprocess:getoutput"], cpu_s=0.5, memory_bytes=2**28)
    before = children()
    assert run("echo 1") == "1"
    (blocked,) = children() - before
    with pytest.raises(LimitExceeded, match=r"^takes longer than 3 s$"):
        run("read line")  # which nobody writes
    assert run("echo 2") == "2"
    assert blocked not in children()


def test_a_function_may_return_bytes_of_any_kind_and_many():
    run = SandboxedFunction("pkgutil:resolve_name", ["base64:b64decode"], cpu_s=5, memory_bytes=2**28)
    assert run("") == b""
    data = bytes(range(256)) * 80_000  # 20 MB, and no UTF-8
    assert run(base64.b64encode(data).decode()) == data
    assert run("aGVsbG8=") == b"hello"


def test_a_process_that_waits_for_something_at_its_start_ends_too(monkeypatch):
    monkeypatch.setattr("text.limited.WALL_S", 1)
    run = SandboxedFunction("time:sleep", [99], cpu_s=0.5, memory_bytes=2**28)
    with pytest.raises(LimitExceeded, match=r"^takes longer than 1 s$"):
        run(None)


def test_the_limits_are_for_each_request_alone():
    limit_s, before = 1, children()
    render = limited(cpu_s=limit_s)
    part = "{% for a in range(99) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ x | length }}"
    render.start()
    (child,) = children() - before
    while processor_s(child) < 2 * limit_s:
        assert render([part, {"x": "é" * 3_000_000}]) == "3000000"
    assert children() - before == {child}


def test_a_process_that_was_killed_between_two_requests_is_replaced():
    render = limited()
    before = children()
    assert render(["{{ 1 }}", {}]) == "1"
    (started,) = children() - before
    os.kill(started, signal.SIGKILL)
    wait_until(lambda: started not in children(), "the end of the process")
    assert render(["{{ 2 }}", {}]) == "2"
    (replacement,) = children() - before
    assert render(["{{ 3 }}", {}]) == "3"
    assert children() - before == {replacement}, "the new process has the next request, too"


def test_a_process_is_there_before_the_first_request_and_after_one_that_took_too_much():
    render, before = limited(cpu_s=0.1), children()
    render.start()
    (started,) = children() - before
    assert render(["{{ 1 }}", {}]) == "1"
    assert children() - before == {started}
    with pytest.raises(LimitExceeded, match=r"longer than 0\.1 s"):
        render([ENDLESS, {}])
    (_replacement,) = children() - before - {started}


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()}


@pytest.mark.parametrize("free", [1, 3])
def test_a_process_that_cannot_be_started_for_want_of_files_leaves_none_open(free):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    unused = [number for number in range(limits[0]) if number not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused[free], limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            limited().start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() == before


def test_the_processes_end_with_the_one_that_started_them():
    code = (
        "import os; from text.template import ChatTemplate; ChatTemplate('{{ 1 }}', {}).render([]); "
        "print(os.getpid(), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdin=-1, stdout=-1, env=os.environ | {"SECRET": "s"}) as ran:
        parent = int(ran.stdout.readline())
        (child,) = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        ran.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), "its end")


def test_a_process_has_neither_the_keys_nor_the_files_of_the_one_that_started_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        limited()(["{{ strftime_now('%H') }}", {}])
        (pid,) = children() - before
        files = [os.readlink(fd).split(":")[0] for fd in Path(f"/proc/{pid}/fd").iterdir()]
    assert set(files) == {"pipe", "/dev/null"}
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"TZ=Asia/Tokyo" in environment and b"secret" not in environment


def test_under_gevent_a_chat_in_a_thread_lets_greenlets_run_and_leaves_their_loop_alone():
    code = """
from gevent import monkey; monkey.patch_all()
import gevent.threadpool
from text.template import ChatTemplate
template, seen = ChatTemplate("{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}x", {}), []
ticker = gevent.spawn(lambda: [seen.append(gevent.sleep(0.001)) for _ in iter(int, 1)])
threads = gevent.threadpool.ThreadPool(2)
print(threads.apply(template.render, ([],)), len(seen) > 3, threads.apply(lambda: gevent.hub._get_hub()))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["x", "True", "None"]


def test_a_template_that_writes_too_much_is_refused():
    render, source = limited(characters=1000), "{{ text }}"
    assert render([source, {"text": "a" * 1000}])
    with pytest.raises(Rejected, match="more than 1000 characters"):
        render([source, {"text": "a" * 1001}])


def test_a_server_answers_a_chat_of_an_endless_template_with_400_and_stops_in_the_middle_of_one(tmp_path):
    endless = "{% if messages[0].content == 'a' %}a{% else %}" + ENDLESS + "{% endif %}"
    (tmp_path / "mine.json").write_text(json.dumps({"chat_template": endless}))
    with Server("--tokenizer-config-path", str(tmp_path / "mine.json")) as server:
        server.wait_ready()

        def chat(content):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            response = server.request("POST", "/v1/chat/completions", body)
            return response.status, json.loads(response.read())

        with ThreadPoolExecutor(12) as clients:
            chats = [clients.submit(chat, "endless") for _ in range(2)]
            assert chat("a")[0] == 200
            for refused in chats:
                status, answer = refused.result()
                assert (status, answer["error"]["message"].split(": ")[0]) == (400, "Template error"), answer
                assert "longer than 1 s of processor time" in answer["error"]["message"]
            last = clients.submit(chat, "endless")
            wait_until(lambda: any(processor_s(pid) > 0.3 for pid in server.pids("text.limited")), "it is rendered")
            stopped_at = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - stopped_at < 20
            assert last.exception() or last.result()[0] in (400, 503)


def processor_s(pid: int) -> float:
    """Of a process that may have ended."""
    with contextlib.suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0
