"""The workflows of GitHub are valid, run what .ci/run runs, and can publish only what a tag names."""

import re
import subprocess
import sys

import pytest
import yaml

import config
from run import HERE

FOLDER = HERE / ".github" / "workflows"
TEXTS = {path.name: path.read_text() for path in FOLDER.glob("*.yml")}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
STEPS = [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_the_workflows_and_the_forms_of_issues_are_what_github_accepts(schema, files):
    found = list(FOLDER.parent.glob(files))
    assert found
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *found]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_push_runs_what_has_to_pass_before_a_change_lands():
    commands = (HERE / ".ci" / "run").read_text()
    needed = set(re.findall(r"\bstep make (\S+)", commands, flags=re.MULTILINE))
    assert needed >= {"lint", "test", "test-clients"}
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    assert needed <= {*jobs["make"]["strategy"]["matrix"]["target"], *jobs}
    scripts = re.findall(r"^(tests/\S+\.sh)", commands, flags=re.MULTILINE)
    assert scripts and all(f"run: sudo {script}" in TEXTS["ci.yml"] for script in scripts)


def test_actions_are_pinned_to_a_commit_and_credentials_are_not_kept():
    actions = [step for step in STEPS if "uses" in step]
    assert actions and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in actions)
    checkouts = [step for step in actions if "checkout" in step["uses"]]
    assert checkouts and not any(step["with"]["persist-credentials"] for step in checkouts)


def test_a_tag_that_is_not_the_version_or_has_no_date_ends_the_release(tmp_path):
    (step,) = [step for step in WORKFLOWS["release.yml"]["jobs"]["version"]["steps"] if "run" in step]
    (tmp_path / "pyproject.toml").write_text((HERE / "pyproject.toml").read_text())

    def run(tag, date):
        head = f"## {config.VERSION} ({date})"
        changelog = re.sub(r"^## .*$", head, (HERE / "CHANGELOG.md").read_text(), count=1, flags=re.MULTILINE)
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        return subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env={"GITHUB_REF_NAME": tag}).returncode

    assert run(f"v{config.VERSION}", "December 2026") == 0
    assert run(f"v{config.VERSION}", "Unreleased") != 0
    assert run("v9.9.9", "December 2026") != 0


BOTH = "linux/amd64,linux/arm64"
IMAGES = {
    "latest": ({"device": "neuron"}, ["", "latest"]),
    "cpu": ({"device": "cpu", "platform": BOTH}, ["-cpu", "cpu"]),
    "cpu-smollm2": ({"device": "cpu", "model": "smollm2", "platform": BOTH}, ["-cpu-smollm2", "cpu-smollm2"]),
    "cuda": ({"device": "cuda"}, ["-cuda", "cuda"]),
}


@pytest.mark.parametrize(("image", "tags"), IMAGES.values(), ids=IMAGES)
def test_each_image_is_published_by_make_with_provenance_and_a_list_of_packages(image, tags):
    publish = WORKFLOWS["release.yml"]["jobs"]["publish"]
    assert publish["strategy"]["matrix"]["include"] == [image for image, _tags in IMAGES.values()]
    (step,) = [step for step in publish["steps"] if step.get("id") == "push"]
    command = step["run"].replace("make image", "make --dry-run image").split("jq ")[0]
    for name in ("device", "model", "platform"):
        command = command.replace(f"${{{{ matrix.{name} }}}}", image.get(name, ""))
    environment = {"IMAGE": "ghcr.io/someone/fork", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-e", "-c", command], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = " ".join(done.stdout.replace("\\\n", " ").split())
    assert "docker buildx build" in built
    assert "--push --provenance=mode=max --sbom=true --metadata-file=build.json" in built
    platform = image.get("platform")
    assert re.findall(r"--platform (\S+)", built) == ([platform] if platform else [])
    named = [tag if tag in IMAGES else config.VERSION + tag for tag in tags]
    assert re.findall(r"-t (\S+)", built) == [f"ghcr.io/someone/fork:{tag}" for tag in named]


def test_the_changelog_begins_with_the_version_and_the_documents_name_it():
    changelog = (HERE / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+) ", changelog, flags=re.MULTILINE)[0] == config.VERSION
    assert set(re.findall(r"neuron-textgen:(\d[\w.]*)", (HERE / "SECURITY.md").read_text())) == {config.VERSION}
    assert f"`v{config.VERSION}`" in (HERE / "CONTRIBUTING.md").read_text()
