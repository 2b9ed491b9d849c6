"""The script that starts, supervises and stops: what it reads of the settings, and the lines that it logs itself."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime

import pytest
from processes import Server, wait_until

from run import HERE

SOON_S = 40  # for what takes a second on an idle machine; without an end it would be a minute or more

# In place of Python: the real config.py, and processes of the two other kinds that do what a test asks for. The check of the
# environment waits for the file MAY_START. The call that has the word SIGNALLED first sends $STOP to the process group.
PYTHON = """#!/usr/bin/env bash
[[ $1 != *"${{SIGNALLED:-nothing}}" ]] || kill -"$STOP" 0
case $1 in
    -c) [[ $2 != *runpy* ]] || exec sleep 60 # compile or plan
        touch "$TMPDIR/is_checked"; until [ -e "${{MAY_START:-/}}" ]; do sleep 0.02; done ;;
    *config.py) [ -z "${{HANGS:-}}" ] || {{ touch "$TMPDIR/hangs"; exec sleep 60; }}; exec {python} "$@" ;;
    *worker.py) {worker} ;;
    *web.py) exec sleep 60 ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script with a worker of these lines of bash."""

    def run(worker, *flags, **settings):
        python = tmp_path / "python"
        python.write_text(PYTHON.format(python=shlex.quote(sys.executable), worker=worker))
        python.chmod(0o755)
        return Server(*flags, PYTHON=str(python), NUMBA_CACHE_DIR="", **settings)

    return run


@pytest.mark.parametrize("name", ["modèle", 'it\'s "quoted"', "back\\slash\\n", "$(touch made) `touch made`", "  a  b "])
def test_the_compiled_loops_are_kept_in_the_model_cache_whatever_its_name(start, tmp_path, name):
    cache = tmp_path / f"x{name}x"
    with start('echo "loops: $NUMBA_CACHE_DIR"; exit 2', MODEL_CACHE=str(cache)) as server:
        assert server.wait_exit() == 2
        assert server.log.splitlines()[-1] == f"loops: {cache}/numba"
    assert (cache / "numba").stat().st_mode & 0o777 == 0o700


def test_a_model_cache_below_a_folder_with_a_line_break_in_its_name_works(start, tmp_path):
    folder = tmp_path / "two\nlines"
    folder.mkdir()
    inside = ("bash", "-c", 'cd "$0" && exec "$OLDPWD/entrypoint.sh"', str(folder))
    with start("exit 2", command=inside, MODEL_CACHE="cache") as server:
        assert server.wait_exit() == 2
    assert (folder / "cache" / "numba").is_dir()


@pytest.mark.parametrize("seconds", ["0.9", "1"])
def test_a_boot_that_takes_too_long_ends_with_1_after_the_time_that_was_given(start, seconds):
    started_at = time.monotonic()
    with start("exec sleep 60", "--startup-timeout", seconds) as server:
        assert server.wait_exit() == 1
        assert time.monotonic() - started_at >= float(seconds)
        words = f"error: the model was not ready within --startup-timeout (STARTUP_TIMEOUT) {seconds} s"
        assert server.log.splitlines()[-1] == words


def test_a_clock_that_is_set_meanwhile_ends_neither_a_start_nor_the_time_to_finish(start, tmp_path):
    """Bash's own clock jumps by up to nine hours at each command of the script."""
    jumps = tmp_path / "jumps"
    (tmp_path / "jump").write_text(f"""
        unset EPOCHREALTIME
        set -T
        trap 'EPOCHREALTIME=$RANDOM.000000; [ $BASHPID != $$ ] || echo >>{shlex.quote(str(jumps))}' DEBUG
    """)

    def wait_for_jumps(many=100):
        jumps.write_text("")
        wait_until(lambda: len(jumps.read_text()) > many, "jumps of the clock")

    worker = 'until [ -e "$TMPDIR/may_start" ]; do sleep 0.05; done' + STUBBORN
    with start(worker, "--graceful-termination-timeout", "1000", BASH_ENV=str(tmp_path / "jump")) as server:
        wait_until(lambda: server.pids("worker.py"), "the worker")
        wait_for_jumps()
        (server.tmp / "may_start").touch()
        wait_until((server.tmp / "is_running").exists, "the end of the start")
        server.process.send_signal(signal.SIGTERM)
        wait_until((server.tmp / "signals").exists, "the signal to stop")
        wait_for_jumps()
        assert len((server.tmp / "signals").read_text().split()) == 1
        assert server.stop() == 0


@pytest.fixture
def checkout(tmp_path):
    """The files of the server in a folder with a blank in its name, without an environment."""
    folder = tmp_path / "my code"
    folder.mkdir()
    for path in HERE.glob("*.*"):
        if path.is_file():
            (folder / path.name).symlink_to(path)
    (folder / "entrypoint.sh").unlink()
    shutil.copy(HERE / "entrypoint.sh", folder)
    return folder


def test_the_environment_beside_the_script_is_used(checkout):
    environment = checkout / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").write_text('#!/bin/sh\necho "here: $*"\n')
    (environment / "python").chmod(0o755)
    done = subprocess.run(
        [checkout / "entrypoint.sh", "--help"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == f"here: {checkout}/config.py --help"


def test_a_python_without_what_the_server_needs_ends_it_with_one_line_that_says_what_to_run(checkout):
    bare = checkout / "python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    bare.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(bare)}
    done = subprocess.run([checkout / "entrypoint.sh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {bare} lacks what the server needs; `make run` in {checkout} installs it\n"


def make(*words, folder=HERE, **environ):
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=SOON_S * 3)


def test_make_help_lists_every_target_that_is_for_people():
    shown = make("help").stdout
    phony = next(line for line in (HERE / "Makefile").read_text().splitlines() if line.startswith(".PHONY: "))
    assert set(phony.split()[1:]) - {"clients"} == set(re.findall(r"^make ([a-z-]+) ", shown, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["PYTHON=/nowhere/python3.9"],
            "error: Python 3.10 to 3.14 is needed, and /nowhere/python3.9 is another (make PYTHON=",
        ),
        (["PYTHON="], "error: Python 3.10 to 3.14 is needed (make PYTHON="),
    ],
)
def test_make_names_a_python_that_does_not_fit(checkout, words, said):
    shutil.copy(HERE / "Makefile", checkout)
    done = make("run", *words, folder=checkout)
    assert done.returncode == 2 and done.stderr.startswith(said)


# Becomes the real worker when it may.
LATE = f"""
    touch "$TMPDIR/is_there"
    while [ ! -e "$TMPDIR/may_start" ]; do sleep 0.05; done
    exec {shlex.quote(sys.executable)} "$@"
"""


@pytest.mark.processes
def test_a_worker_that_starts_after_the_script_was_killed_ends_too(start):
    with start(LATE) as server:
        wait_until((server.tmp / "is_there").exists, "the worker")
        server.process.kill()
        server.process.wait()
        (server.tmp / "may_start").touch()
        wait_until(lambda: not server.pids("worker.py"), "the end of the worker", 30)


# As processes that do not see a signal so soon after their start.
DEAF = """
    trap '' TERM
    touch "$NEURON_TEXTGEN_RUN_DIR/deaf"
    while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("since", ["lock", "config.json", "idle", "deaf"])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_before_the_server_is_ready_ends_it_at_once(start, since, stop):
    with start(DEAF) as server:
        wait_until(lambda: server.run_dir and (server.run_dir / since).exists(), since)
        server.process.send_signal(stop)
        assert server.wait_exit(SOON_S) == 0
        assert server.log.splitlines()[-1].endswith("entrypoint: Stopped")


@pytest.mark.parametrize(("subcommand", "code"), [("serve", 0), ("--help", 0), ("compile", 143), ("plan", 143)])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_in_the_first_moment_is_not_lost(start, tmp_path, subcommand, code, stop):
    """What would follow a `compile` that succeeded must not begin: compile … && serve."""
    command = ("./entrypoint.sh", subcommand)
    with start(DEAF, command=command, MAY_START=str(tmp_path / "may_start")) as server:
        wait_until((server.tmp / "is_checked").exists, "the first command")
        server.process.send_signal(stop)
        (tmp_path / "may_start").touch()
        assert server.wait_exit(SOON_S) == code
        assert server.log == ""


@pytest.mark.parametrize("during", ["readlink", "-c", "mktemp", "config.py", "mkfifo"])
@pytest.mark.parametrize("stop", ["TERM", "HUP", "INT"])
def test_a_stop_of_the_whole_process_group_in_the_first_second_is_no_error(start, tmp_path, during, stop):
    for command in ("readlink", "mktemp", "mkfifo"):
        signalling = f'[ {command} != "$SIGNALLED" ] || kill -"$STOP" 0'
        (tmp_path / command).write_text(f'#!/bin/sh\n{signalling}\nexec {shutil.which(command)} "$@"\n')
        (tmp_path / command).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with start(DEAF, PATH=path, SIGNALLED=during, STOP=stop) as server:
        assert server.wait_exit(SOON_S) == 0
        assert "error" not in server.log and len(server.log.splitlines()) <= 2  # "Starting" and "Stopped"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_to_stop_ends_the_reading_of_the_model_folder(start, stop):
    with start(DEAF, HANGS="yes") as server:
        wait_until((server.tmp / "hangs").exists, "the reading")
        for _ in range(50):  # the script may not have seen the first one when the second comes
            server.process.send_signal(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(0.2)
                break
        assert server.wait_exit(SOON_S) == 0 and server.log == ""


# Runs a command in a terminal, in which SIGINT presses Ctrl-C.
TERMINAL = """
import contextlib, os, pty, signal, sys
pid, terminal = pty.fork()
if not pid:
    os.execv(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGINT, lambda *_: os.write(terminal, b"\\x03"))
with contextlib.suppress(OSError):  # at its end
    while piece := os.read(terminal, 1024):
        os.write(1, piece)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("since", ["lock", "config.json", "idle", "deaf"])
def test_ctrl_c_before_the_server_is_ready_ends_it_at_once_and_without_a_traceback(start, since):
    command = (sys.executable, "-c", TERMINAL, "./entrypoint.sh")
    with start(DEAF, command=command) as server:
        wait_until(lambda: server.run_dir and (server.run_dir / since).exists(), since)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(SOON_S) == 0
        lines = server.log.replace("^C", "").split("\n")  # the terminal shows the key, before, behind or within a line
        starting, *others = [line for line in map(str.strip, lines) if line] or [None]
        # With the lock, the first process that would write may not have begun.
        assert "config: Starting" in starting if starting else since == "lock", server.log
        # What the first second starts may end at the signal itself, and then nothing is said.
        assert all(line.endswith("entrypoint: Stopped") for line in others), server.log


# Writes the time of each SIGTERM, and ends at the second one.
STUBBORN = """
    trap 'date +%s.%N >>"$TMPDIR/signals"; [ "$(wc -l <"$TMPDIR/signals")" -lt 2 ] || exit 0' TERM
    touch "$NEURON_TEXTGEN_RUN_DIR/ready" "$TMPDIR/is_running"
    while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_running_requests_have_the_time_that_was_given_after_a_signal_to_stop(start, stop):
    with start(STUBBORN, "--graceful-termination-timeout", "0.6", "--json-output") as server:
        wait_until((server.tmp / "is_running").exists, "the worker")
        assert server.stop(stop) == 0
        _first, second, *_ = map(float, (server.tmp / "signals").read_text().split())
        lines = [json.loads(line) for line in server.log.splitlines()]
    stopping = lines[-2]
    assert "Stopping; running requests have 0.6 s to finish, " in stopping["fields"]["message"]
    assert second - datetime.fromisoformat(stopping["timestamp"].replace("Z", "+00:00")).timestamp() >= 0.5
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"]) for line in lines)


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "after the first"])
def test_a_second_signal_to_stop_ends_running_requests_before_their_time(start, is_at_once):
    with start(STUBBORN, "--graceful-termination-timeout", "1000") as server:
        wait_until((server.tmp / "is_running").exists, "the worker")
        server.process.send_signal(signal.SIGTERM)
        if not is_at_once:
            wait_until((server.tmp / "signals").exists, "the first signal")
        assert server.stop(signal.SIGINT) == 0
        assert len((server.tmp / "signals").read_text().split()) == 2
        assert "Stopping; running requests have 1000 s to finish, " in server.log


def test_ctrl_c_reaches_the_worker_as_a_signal_to_stop(start):
    command = (sys.executable, "-c", TERMINAL, "./entrypoint.sh", "--graceful-termination-timeout", "0.6")
    with start(STUBBORN, command=command) as server:
        wait_until((server.tmp / "is_running").exists, "the worker")
        assert server.stop(signal.SIGINT) == 0
        assert len((server.tmp / "signals").read_text().split()) == 2
