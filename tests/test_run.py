"""What machines that are full or small do to a start: one line, and nothing is left behind."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

import pytest
from processes import Server

import run
from run import HERE

SOON_S = 90  # for what takes less than a second on a machine with nothing else to do


@pytest.fixture
def short_path():
    """A folder whose path leaves room for the name of a socket; pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="textgen-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def with_name_of(short_path):
    """Makes a folder whose path has that many bytes."""

    def make(length):
        folder = short_path / ("x" * (length - len(str(short_path)) - 1))
        folder.mkdir()
        assert len(str(folder)) == length
        return folder

    return make


def run_in(folder, *command):
    """The exit code and the output of a start in the shell `command`, with the log in place of the arguments."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"TMPDIR": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=SOON_S)
    return done.returncode, done.stderr


def one_error(code_and_output):
    code, output = code_and_output
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.split()[1:2] != ["INFO"]]
    return line


ORPHAN = """
import os, sys
from run import die_with_parent
die_with_parent()
if os.fork():
    os._exit(0)  # the parent of what follows
sys.stdin.read()  # until the test has seen the parent's end
die_with_parent()
print("survives")
"""


def test_a_process_ends_whose_parent_died_before_it_could_ask_for_that():
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, cwd=HERE, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as parent:
        parent.wait(SOON_S)
        output, errors = parent.communicate("", timeout=SOON_S)
    assert output == "" and errors == f"error: process {parent.pid}, which started this one, has ended\n"


START = "./entrypoint.sh serve --port 1"
LONGEST = run.MAX_SOCKET_NAME - len("/neuron-textgen.12345678/worker.sock")


def test_a_folder_for_temporary_files_with_too_long_a_name_is_refused_with_the_variable(with_name_of):
    folder = with_name_of(LONGEST + 1)
    line = one_error(run_in(folder, "sh", "-c", START))
    assert line == f"error: {folder}: the path is 1 bytes too long for a folder with a socket; name another with TMPDIR"
    assert not [*folder.iterdir()]


@pytest.mark.processes
def test_a_server_runs_in_a_folder_with_the_longest_name_that_a_socket_may_have(with_name_of):
    with Server(TMPDIR=str(with_name_of(LONGEST))) as server:
        server.wait_ready()
        server.process.terminate()
        assert server.process.wait(SOON_S) == 0


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("ulimit -n 20", "20 open files (ulimit -n), and the server needs at least 256; raise the limit"),
        ("ulimit -v 1000000", "1024000000 bytes of address space (ulimit -v), and the server needs at least 2000000000"),
    ],
)
def test_too_low_a_limit_of_the_process_is_refused_with_what_is_needed(short_path, limit, words):
    line = one_error(run_in(short_path, "sh", "-c", f"{limit}; {START}"))
    assert line.startswith("error: this process may have ") and words in line
    assert not [*short_path.iterdir()]


def test_a_folder_for_temporary_files_that_is_not_there_is_named_with_the_variable(tmp_path):
    line = one_error(run_in(tmp_path / "nowhere", "sh", "-c", START))
    assert str(tmp_path / "nowhere") in line and line.endswith("No such file or directory; name another folder with TMPDIR")


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs root and mount namespaces",
)


@needs_mounts
@pytest.mark.parametrize(
    ("options", "fill", "words"),
    [
        ("size=64k,ro", "true", "Read-only file system; name another folder with TMPDIR"),
        ("size=64k", "cat /dev/zero > $TMPDIR/fill", "No space left on device; free space, or name another folder with TMPDIR"),
    ],
)
def test_a_full_or_read_only_folder_for_temporary_files_is_named_with_the_variable(short_path, options, fill, words):
    mounted = f"mount -t tmpfs -o {options} tmpfs $TMPDIR; {fill} 2>/dev/null; {START}; code=$?; ls $TMPDIR >&2; exit $code"
    code, output = run_in(short_path, "unshare", "--mount", "sh", "-c", mounted)
    line = one_error((code, output.removesuffix("fill\n")))  # nothing else is left there
    assert str(short_path) in line and words in line
