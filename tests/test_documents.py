"""The documents are true of the code: settings, fields, routes, metrics, the names of other servers, links and figures."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys

import documents
import pytest
import yaml
from documents import FILES

import config
from api.routes import openapi_document
from engine.metrics import Metrics
from models.checkpoint.quantization import SUPPORTED_METHODS
from models.neuron import families
from run import HERE
from text.output.call_syntaxes import AllowedCalls, Function, ModelTools, calls_grammar, not_written
from text.output.tool_formats import TOOL_FORMATS

DOCUMENTS = [path for folder in (".", "bench", "demo", "docs", "docs/*", "deploy/*") for path in HERE.glob(f"{folder}/*.md")]
README = (HERE / "README.md").read_text()
MIGRATING = {path.stem: path.read_text() for path in sorted((HERE / "docs" / "migrating").glob("*.md"))}
SETTINGS = {
    name for flag, entry in config.SETTINGS.items() for name in (flag, *entry.metadata["names"], *entry.metadata["flags"])
}
COMPATIBILITY_ALIASES = {
    name.partition("=")[0]: effect.replace("_", " ")
    for effect, table in json.loads((HERE / "compatibility_aliases.json").read_text()).items()
    for names in table
    for name in names.split()
}
API = openapi_document()
TYPES = {name: set(kind.get("properties", ())) for name, kind in API["components"]["schemas"].items()}
REQUEST_FIELDS = set().union(*(fields for name, fields in TYPES.items() if name.endswith(("Request", "Parameters"))))


def rows():
    """The rows with two cells on the pages about migrating: (page, section, names in backticks of the first cell, second)."""
    for page, text in MIGRATING.items():
        for section in re.split(r"^## ", text, flags=re.MULTILINE):
            for there, here in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, flags=re.MULTILINE):
                yield page, section.splitlines()[0], re.findall(r"`([^`]+)`", there), here


ROWS = [(page, names, here) for page, section, names, here in rows() if section != "Start commands"]
COMMANDS = [(names[0], here) for _page, section, names, here in rows() if section == "Start commands" and names]


def test_the_guide_describes_each_name_as_the_code_treats_it():
    for page, name, here in [(page, name, here) for page, names, here in ROWS for name in names]:
        if name in COMPATIBILITY_ALIASES:
            assert here.startswith(COMPATIBILITY_ALIASES[name]), name
        elif name in SETTINGS:
            assert not here.startswith(("no effect", "not supported", "none")), name
        elif re.fullmatch(r"--[a-z-]+|[A-Z][A-Z_]+", name):
            assert page == "vllm", f"{name} is known neither as a setting nor as another server's"
        elif here.startswith("same") and name.islower() and name.isidentifier():
            assert name in REQUEST_FIELDS, name


@pytest.mark.parametrize("effect", ["rejected", "ignored"])
def test_a_field_of_another_server_is_rejected_or_ignored_as_the_guide_says(served, effect):
    names = [name for _, names, here in ROWS for name in names if here.startswith(effect) and name.isidentifier()]
    assert len(names) > 4
    for name in names:
        if name == "watermark":
            response = served.post("/generate", {"inputs": "a", "parameters": {name: "x"}})
        else:
            response = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], name: "x"})
        if effect == "ignored":
            assert response.status_code == 200, f"{name}: {response.json}"
        else:
            assert response.status_code in (400, 422) and name in str(response.json), name


@pytest.mark.parametrize(("there", "here"), COMMANDS)
def test_a_start_command_of_another_server_means_what_the_guide_says(there, here):
    words, variables = shlex.split(there), {}
    while words.pop(0) == "-e":
        name, _, variables[name] = words.pop(0).partition("=")
    environ = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run([sys.executable, HERE / "config.py", *words], env=environ, capture_output=True, text=True)
    (flags,) = re.findall(r"`([^`]+)`", here)
    if here.startswith("ends: "):
        assert (done.returncode, done.stderr) == (2, f"error: {flags}\n")
        return
    given = {word for word in (*variables, *words) if re.fullmatch(r"--[a-z-]+|[A-Z]\w+", word)}
    said = set(re.findall(r"(\S+) has no effect", done.stderr))
    assert given <= SETTINGS | set(COMPATIBILITY_ALIASES) | said
    assert config.Config.from_json(done.stdout) == config.parse(shlex.split(flags), {})


def test_the_table_of_quantized_checkpoints_has_what_is_supported():
    rows = (HERE / "docs" / "checkpoints.md").read_text().split("\n| `quant_method` |")[1].split("\n\n")[0].splitlines()[2:]
    table = {cells[1].strip(" `"): cells[2:4] for cells in (line.split("|") for line in rows)}
    assert set(table) == set(SUPPORTED_METHODS)
    for method, settings in SUPPORTED_METHODS.items():
        supported = {value for values in settings.values() for value in values if isinstance(value, str)}
        supported |= {f"{value} bits" for value in settings.get("bits", settings.get("num_bits", ()))}
        there, rejected = table[method]
        assert all(re.search(rf"\b{value.replace(' ', '.*')}\b", there) for value in supported), method
        assert not supported & set(re.findall(r"(?<=`)[^`, ]+(?=`)|\d bits", rejected)), method


def test_the_steps_of_the_guide_start_this_server_with_its_flags():
    pattern = r"`[^`]*(?:entrypoint\.sh serve|neuron-textgen/neuron-textgen) (--[^`]*)`"
    starts = [flags for text in MIGRATING.values() for flags in re.findall(pattern, text)]
    assert len(starts) >= 3
    for flags in starts:
        assert config.parse(shlex.split(flags), {}).model_id == shlex.split(flags)[1]


def test_every_name_of_this_server_in_the_guide_exists():
    metrics = Metrics("")
    metrics.describe_model(1, 1, 2, "float32", None)
    series = set(re.findall(r"^# TYPE (\w+)", metrics.render().decode(), flags=re.MULTILINE))
    of_libraries = {"NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS", "OTEL_SERVICE_NAME"}
    for _section, _names, here in ROWS:
        for name in re.findall(r"`([^`]+)`", here):
            if re.fullmatch(r"--[a-z-]+|[A-Z][A-Z_]+", name):
                assert name in SETTINGS | of_libraries, name
            elif name.startswith("tgi_"):
                assert name.removesuffix("_sum") in series, name


def test_what_is_made_of_the_code_is_what_it_makes_now():
    changed = [path.name for path, text in documents.pages().items() if path.read_text() != text]
    assert changed == [], "python tests/documents.py writes them"


def test_the_page_about_neuron_has_each_family():
    page = (HERE / "docs" / "neuron-families.md").read_text()
    listed = re.findall(r"^\| (`.*?) \|", page.split("\n| family |")[1].split("\n\n")[0], flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == set(families.FAMILIES)


def test_the_page_about_tools_has_each_format_and_what_its_calls_enforce():
    begin, formats, *_others = re.split(r"^## .*\n", (HERE / "docs" / "api" / "tools.md").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \|", formats, flags=re.MULTILINE)) == {form.name for form in TOOL_FORMATS} | {"none"}
    assert {name for form in TOOL_FORMATS for name in form.other_names} <= set(re.findall(r"`(\w+)`", formats))
    properties = {"word": {"type": "string", "pattern": "^(sun|rain)$"}, "number": {"type": "integer", "maximum": 3}}
    function = Function("f", {"type": "object", "properties": properties}, True)
    grammars = {}
    for form in TOOL_FORMATS:
        calls = AllowedCalls(ModelTools(form), [function], "required", parallel=False)
        grammars[form.name] = calls_grammar(calls, "calls", "")
    rows = re.findall(r"^\| ((?:`\w+`, )+`\w+`) \|", begin, flags=re.MULTILINE)
    in_tags, in_pairs = (set(re.findall(r"\w+", names)) for names in rows)
    assert {name for name, grammar in grammars.items() if "sun|rain" not in grammar} == in_tags | in_pairs
    assert {name for name, grammar in grammars.items() if "maximum" not in grammar} == in_pairs
    not_enforced = {form.name: set(not_written(form, function)) for form in TOOL_FORMATS}
    assert {name for name, places in not_enforced.items() if "/properties/word/pattern" in places} == in_tags | in_pairs
    assert {name for name, places in not_enforced.items() if "/properties/number/maximum" in places} == in_pairs


def test_the_readme_names_every_route_and_the_guide_no_other():
    routes = {*API["paths"], "/docs", "/api-doc/openapi.json"}
    table = README.split("## API\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/.{}-]*)(?:\?[^`]*)?`", table)) == routes
    guide = {path for *_, here in ROWS for path in re.findall(r"`(?:GET |POST )?(/[\w/]+)`", here)}
    guide |= {path for _, names, here in ROWS if here.startswith("same") for path in names if path.startswith("/")}
    assert guide and guide <= routes


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(HERE)))
def test_links_lead_to_a_file_and_to_a_heading(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        if anchor:
            # The site makes tabs of these headings, without anchors.
            text = re.sub("<!-- tabs -->.*?<!-- end of tabs -->", "", file.read_text(), flags=re.DOTALL)
            headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_the_readme_is_short_and_its_picture_is_small():
    assert len(README.splitlines()) < 200
    pictures = re.findall(r"!\[[^\]]+\]\((docs/[\w-]+\.\w+)\)", README)
    assert pictures and all((HERE / picture).stat().st_size < 400_000 for picture in pictures)


def test_the_figures_of_the_readme_are_means_of_those_in_bench():
    tables = []
    for text in (README, (HERE / "bench" / "README.md").read_text()):
        rows = text.split("\n| streams | this server, int8 |")[1].split("\n\n")[0].splitlines()[2:]
        tables.append([[[float(n) for n in cell.split(", ")] for cell in row.strip("| ").split(" | ")] for row in rows])
    for (mean,), rounds in [pair for rows in zip(*tables) for pair in zip(*rows)]:
        assert mean == pytest.approx(sum(rounds) / len(rounds), abs=0.06)
    assert [len(rows) for rows in tables] == [3, 3]


def test_each_badge_of_the_readme_is_a_line():
    """The site leaves these lines out: they show images of other hosts."""
    assert README.count("[![") == len(re.findall(r"^\[!\[[^\]]+\]\(\S+\)\]\(\S+\)$", README, flags=re.MULTILINE))


def test_the_readme_leads_to_every_page_that_a_reader_looks_for():
    wanted = ["quickstart", "inferentia2", "models", "api", "clients", "agents", "settings", "faq", "migrating", "comparison"]
    wanted = [f"docs/{page}.md" for page in (*wanted, "first-run", "architecture")]
    wanted += ["bench/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    wanted += [str(path.relative_to(HERE)) for path in HERE.glob("deploy/*/README.md")]
    assert [page for page in wanted if f"]({page}" not in README] == []


def test_the_examples_of_the_readme_are_those_of_pages_whose_examples_are_run():
    pages = "".join((HERE / "docs" / page).read_text() for page in ("clients.md", "quickstart.md"))
    blocks = re.findall(r"^```(?:python|sh)\n(?:from|curl) .*?^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) > 1 and all(block in pages for block in blocks)


def blocks():
    """The blocks of code in all documents: (document, language, code)."""
    for path in DOCUMENTS:
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE):
            yield str(path.relative_to(HERE)), language, code


BLOCKS = list(blocks())
COMMAND = re.compile(r"(make|sudo|docker|git|curl|kubectl|helm|pip|python3|export|cat|mkdir|[A-Z_]+=\S)")
SHELL = [(document, code) for document, language, code in BLOCKS if language == "sh" or COMMAND.match(code)]


def flags_in(words):
    return set(re.findall(r"(?<!\S)--[a-z][\w-]*", words))


def test_each_block_of_code_is_valid_in_its_language():
    assert {language for _, language, _ in BLOCKS} <= {"", "sh", "python", "javascript", "json", "yaml", "toml"}
    readers = {"python": ast.parse, "json": json.loads, "yaml": yaml.safe_load}
    for _document, language, code in BLOCKS:
        readers.get(language, str)(code)
    for document, code in SHELL:
        done = subprocess.run(["bash", "-n", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, f"{document}: {done.stderr}"


def test_the_commands_in_documents_name_targets_and_settings_that_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (HERE / "Makefile").read_text(), flags=re.MULTILINE))
    used = {target for _, code in SHELL for target in re.findall(r"^(?:\S+=\S+ )*make ([a-z][\w-]*)", code, flags=re.MULTILINE)}
    assert len(used) > 3 and used <= targets
    image = r"neuron-textgen/neuron-textgen(?::\S+)?"
    serves = re.compile(rf"(?:{image}|entrypoint\.sh serve) +(--[^#|&]*)|make run.*ARGS=\"(.*?)\"")
    started = [(document, match) for document, code in SHELL for match in serves.findall(code.replace("\\\n", " "))]
    assert len(started) > 4
    assert [(document, match) for document, match in started if not flags_in(" ".join(match)) <= SETTINGS] == []


def test_every_page_is_on_the_site():
    listed = set(re.findall(r"([\w/-]+\.md)$", (HERE / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {path.relative_to(HERE / "docs").as_posix() for path in HERE.glob("docs/**/*.md")}
    pages |= {f"deploy/{path.parent.name}.md" for path in HERE.glob("deploy/*/README.md")}
    assert listed == pages | {
        "index.md",
        "bench.md",
        "demo.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CODE_OF_CONDUCT.md",
        "CHANGELOG.md",
    }


def test_the_errors_of_the_faq_are_those_of_the_code():
    said = set()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.JoinedStr):
            said.add("".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said.add(node.value)
    said = "\n".join(said)
    faq = (HERE / "docs" / "faq.md").read_text()
    quoted = re.findall(r"^\| .*?`([^`]* [^`]*)`.*? \| ", faq, flags=re.MULTILINE)
    parts = [part for text in quoted for part in re.split(r" ?… ?", text)]
    assert len(quoted) > 15 and [part for part in parts if part not in said] == []


def test_the_stages_of_a_request_are_those_that_the_log_has():
    section = (HERE / "docs" / "operations.md").read_text().split("## Following a request\n")[1].split("\n## ")[0]
    stages = re.findall(r"`([a-z ]+)`", section)
    source = "".join(path.read_text() for path in FILES)
    assert len(stages) == 7 and [stage for stage in stages if f'"{stage}"' not in source] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(HERE)))
def test_the_files_and_names_of_code_that_a_document_names_are_there(document):
    text = document.read_text()
    for path in re.findall(r"\bdeploy/[\w./-]*\w", text):
        assert (HERE / path).exists(), path
    for path, name in re.findall(r"`([\w/]+\.py): ([\w.]+)", text):
        source = (HERE / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(async )?(def|class) {part}\b|^{part}( =|:)", source, flags=re.MULTILINE), f"{path}: {name}"
    if document.name == "architecture.md":
        written = re.sub(r"\n## Files\n\n(\|.*\n)+", "", text)  # a docstring names the files beside it without their folder
        assert [path for path in re.findall(r"`([\w/]+\.\w+)`", written) if not (HERE / path).exists()] == []


def test_the_tables_of_replicas_are_what_the_simulation_and_the_published_figures_say(monkeypatch):
    monkeypatch.syspath_prepend(HERE / "bench")
    import replicas

    page = (HERE / "docs" / "scaling.md").read_text()
    times, _figure = replicas.published(replicas.MODEL, replicas.INSTANCE)
    most = times.requests_per_s(replicas.TOKENS)
    assert f"{most:.2f} requests/s or {most * replicas.TOKENS:.0f} tokens/s" in re.sub(r"\s+", " ", page)
    of_times = f"prompts of 128 tokens {times.prompt_s * 1e3:g} ms, steps {times.step_s * 1e3:g} ms"
    assert of_times in re.sub(r"\s+", " ", page)
    simulated = replicas.report_simulation(replicas.MODEL, replicas.INSTANCE, [2, 4], 0.8)
    rows = [*(row for row in simulated if re.match(r"\| \d", row)), *replicas.report_costs()]
    assert len(rows) > 10 and [row for row in rows if row not in page] == []
