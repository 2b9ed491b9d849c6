"""Open Responses' compliance tests against the real server with SmolLM2. OPENRESPONSES is a checkout of the project."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import Server
from published import weights

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())["open_responses"]
PACKAGES = Path(os.environ.get("SUITES", "/nowhere"))


@pytest.mark.skipif(not os.environ.get("OPENRESPONSES"), reason="OPENRESPONSES names no checkout")
@pytest.mark.skipif(not (PACKAGES / "tsx").exists(), reason="npm could not install tsx and zod")
def test_every_case_passes_but_those_with_a_reason(tmp_path, capsys):
    checkout = Path(os.environ["OPENRESPONSES"])
    for name in ("bin", "src"):
        shutil.copytree(checkout / name, tmp_path / name)
    shutil.copy(checkout / "tsconfig.json", tmp_path)
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    with Server(MODEL_ID=str(weights.file("smollm2"))) as server:
        server.wait_ready()
        options = ["--base-url", f"http://localhost:{server.port}/v1", "--api-key", "none", "--model", "smollm2", "--json"]
        runner = ["node", str(PACKAGES / "tsx" / "dist" / "cli.mjs"), "bin/compliance-test.ts"]
        ran = subprocess.run([*runner, *options], cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert "{" in ran.stdout, ran.stderr
    results = json.loads(ran.stdout[ran.stdout.index("{") :])["results"]
    failed = {each["name"]: each.get("errors") for each in results if each["status"] == "failed"}
    with capsys.disabled():
        print(f"\nOpen Responses: {len(results) - len(failed)} of {len(results)} cases pass")
    assert {name: errors for name, errors in failed.items() if name not in EXPECTED} == {}
