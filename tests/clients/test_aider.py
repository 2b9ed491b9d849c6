"""aider as docs/agents.md configures it: it has no tools, and writes what the answer says into a file."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from scripted_server import documented, needs_npm, serving_script

pytestmark = needs_npm()

FILE, CONTENT = "greeting.txt", "Hello, world!"


def test_aider_writes_a_file(home, tmp_path):
    answer = f"{FILE}\n```\n{CONTENT}\n```"
    with serving_script(tmp_path, "qwen2_5", {"use-aider": answer}) as url:
        command = shlex.split(documented("aider", url))
        assert shutil.which(command[0], path=Path(sys.executable).parent)
        subprocess.run(["git", "init", "--quiet"], cwd=home.work, check=True)
        quiet = ["--message", "use-aider", "--yes-always", "--no-check-update", "--no-analytics", "--no-auto-commits"]
        said = home.run([str(Path(sys.executable).parent / command[0]), *command[1:], *quiet])
    assert (home.work / FILE).read_text().strip() == CONTENT, said
