"""What is made of the code in docs/: a function for each table, list of tables or page.

python tests/documents.py     writes all of them into their pages
"""

import ast
import contextlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

import torch
import transformers
from published.configs import CONFIGS, OTHERS
from published.families import CODE, FAMILIES, OPENVINO, TORCH

from api.routes import openapi_document
from config import FP8, SETTING_GROUPS, SETTINGS, Config
from engine.metrics import Metrics
from manifest import Manifest
from models.errors import ModelError
from models.machine import GIB
from models.neuron import families, plan
from run import HERE, ConfigError

FOLDERS = ("api", "text", "engine", "models")  # the product's Python files are theirs and the top level's
FILES = [*sorted(HERE.glob("*.py")), *(path for folder in FOLDERS for path in sorted((HERE / folder).glob("**/*.py")))]


def table(head, rows):
    escaped = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    return "\n".join([f"| {head} |", "|---" * len(head.split(" | ")) + "|", *lines])


def in_code(names):
    return ", ".join(f"`{name}`" for name in names)


def layers():
    """Each layer of the product, from the top down: what it holds, floor by floor, and what it may import."""
    from test_layers import FLOORS, MAY_IMPORT  # which needs FILES

    def in_folder(folder, name):
        return f"`{name}/`" if (HERE / folder / name).is_dir() else name

    def layer(name):
        if name in FOLDERS:
            return f"{name}/"
        return name.replace(".", "/") + ".py"

    rows = []
    for name, others in reversed(MAY_IMPORT.items()):
        floors = [floor.split() for floor in FLOORS[name].split(" | ")] if name in FLOORS else []
        shown = " → ".join(", ".join(in_folder(name, each) for each in floor) for floor in floors)
        rows.append((in_code([layer(name)]), shown, in_code(map(layer, others.split()))))
    return table("layer | its floors, the top one first | imports", rows)


def files():
    """Each Python file with the first sentence of its docstring."""

    def first_sentence(path):
        text = " ".join(ast.get_docstring(ast.parse(path.read_text())).split())
        return re.split(r"\.(?: |$)", text)[0]

    return table("file | what it is", [(f"`{path.relative_to(HERE)}`", first_sentence(path)) for path in FILES])


def mistakes():
    """What models write wrong in calls that are read all the same, with the formats in which tests try it."""
    from tool_calls import MISWRITTEN  # which needs what the environment of Neuron's tests does not have

    formats = {}
    for what, name, _text, _calls in MISWRITTEN:
        formats.setdefault(what, {})[name] = None
    return table("mistake | tried in", [(what, in_code(names)) for what, names in formats.items()])


ENGINES = {OPENVINO: "OpenVINO", TORCH: "PyTorch"}
REASONS = {
    CODE: "Python code of its own; `--trust-remote-code` runs it",
    "encoder-decoder": "an encoder-decoder",
}


def served_families():
    """Each type of config.json and where it is served. CPU: the engine that the suite of families (published/families.py) must
    find; CUDA: whether plain PyTorch serves it; Neuron: whether models/neuron/families.py reads its config.json."""

    def on_cpu(family):
        if family.refused:
            return f"no: {REASONS.get(family.refused, family.refused)}"
        engine = ENGINES[family.engine]
        if family.default_engine == family.engine:
            return engine
        return f"{engine}, in bfloat16 {ENGINES[family.default_engine]}"

    def on_neuron(family):
        try:
            families.of(family.config)
        except (ConfigError, ModelError):
            return "no"
        return "yes"

    models = {}  # by all other columns
    for family in FAMILIES:
        on_cuda = "no" if family.refused else "PyTorch"
        where = (on_cpu(family), on_cuda, on_neuron(family))
        models.setdefault((family.config["model_type"], where), []).append(family.name)
    rows = [(f"`{kind}`", ", ".join(names), *where) for (kind, where), names in models.items()]
    return table("`model_type` | models | CPU | CUDA | Neuron", rows)


SIZES = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3.5-4B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "Qwen/Qwen3-32B",
)
CONVERSION_GB = 1
CONVERSION = 2, 1.2  # times the checkpoint, as docs/memory.md says: in bfloat16, int8


def sizes():
    """Examples of memory. The context lengths are those that a server on a CPU chooses for 4 slots."""

    def row(name):
        config_json = (CONFIGS | OTHERS)[name]
        text_config = transformers.AutoConfig.for_model(**config_json).get_text_config()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(text_config)
        longest = text_config.max_position_embeddings
        manifest = Manifest(text_config.model_type, longest, (), config_json=config_json)
        billions = sum(each.numel() for each in model.parameters()) / 1e9
        whole, compressed = (CONVERSION_GB + 2 * billions * times for times in CONVERSION)
        configs = [Config(model_id=name).with_manifest(manifest, memory * GIB) for memory in (16, 64, 256)]
        return [
            name,
            f"{billions:.1f} billion",
            f"{2 * billions:.1f} / {billions:.1f} GB",
            f"{whole:.0f} / {compressed:.0f} GB",
            f"{manifest.kv_bytes / 2 * 1000 / 1e6:.0f} MB",
            " / ".join(f"{config.max_total_tokens:,}" for config in configs),
        ]

    head = "model | parameters | weights: bfloat16 / int8 | conversion | KV cache, 1,000 tokens | context on 16 / 64 / 256 GiB"
    return table(head, map(row, SIZES))


COMMON = {"le", "quantile", "model_name", "engine"}  # of all histograms and summaries; of all with vLLM's names


def metrics():
    """What /metrics shows once a model is loaded."""
    made = Metrics("model")
    made.describe_model(1, 1, 2, "float32", None)
    made.series("startup_phase_seconds", "loading").set(1)
    made.series("adapter_requests", "french").inc()
    rows = []
    for block in made.render().decode().split("# HELP ")[1:]:
        name, about = block.splitlines()[0].split(" ", 1)
        kind = re.search(r"^# TYPE \S+ (\w+)$", block, re.MULTILINE)[1]
        labels = dict.fromkeys(re.findall(r'[{,](\w+)="', block))
        rows.append((f"`{name}`", kind, in_code(label for label in labels if label not in COMMON), about))
    return table("name | type | labels | what it shows", rows)


SMALLER = {"quantize": "int8", "kv_cache_dtype": FP8}


def smallest(name, **settings):
    """(instance, sizing) for a published model: the smallest of Inferentia2 with room for slots of 2,048 tokens, as `plan` has
    it; None where it fits on no instance."""
    family = families.of(CONFIGS[name])
    for instance, machine in plan.INSTANCES.items():
        with contextlib.suppress(ConfigError):
            sizing = plan.choose_sizing(family, machine, Config(model_id=name, **settings))
            is_enough = plan.memory_warning(family, machine) is None and sizing.length >= plan.USEFUL_LENGTH
            if machine.family == "inf2" and is_enough:
                return instance, sizing
    return None


def neuron_models():
    """Which published models run on Neuron, and where."""

    def slots(sizing):
        return f"{sizing.batch_size} of {sizing.length:,}"

    def row(name):
        instance, smaller = smallest(name, **SMALLER)
        where = ("none", "", "")
        if found := smallest(name):
            where = (found[0], found[1].tp_degree, slots(found[1]))
        size = f"{smaller.family.parameters / 1e9:.1f} billion"
        in_int8 = f"{instance} with {smaller.tp_degree}: {slots(smaller)}"
        return (name, smaller.family.model_type, size, *where, in_int8)

    head = "model | family | parameters | smallest Inferentia2 instance | tp_degree | slots of tokens | int8, FP8 KV cache"
    return table(head, map(row, CONFIGS))


def settings():
    """A section with a table for each group."""
    groups = {}
    for flag, entry in SETTINGS.items():
        if flag in SETTING_GROUPS:
            rows = groups[SETTING_GROUPS[flag]] = []
        about = entry.metadata
        rows.append((f"`{flag}`", in_code(about["names"]), about["shown"], about["help"]))
    head = "flag | environment | default | meaning"
    return "\n\n".join(f"## {group}\n\n{table(head, rows)}" for group, rows in groups.items()) + "\n"


def other_names():
    """The names of other servers."""
    rows = []
    for effect, names_of_effect in json.loads((HERE / "compatibility_aliases.json").read_text()).items():
        for names, text in names_of_effect.items():
            shown = in_code(names.split()).replace("=", "` other than `")
            rows.append((shown, f"{effect.replace('_', ' ')}: {text}"))
    return table("flags and variables | here", rows)


ROUTES = """# Routes

Made from the server's OpenAPI document, which `GET /api-doc/openapi.json` returns and `GET /docs` shows, to try it out.
[The API](api.md) says what each field does. Routes marked with 🔑 require the API key if the server has one.

A stream consists of server-sent events: `data: ` with JSON, and an empty line. OpenAI's streams end with `data: [DONE]`; the
events of `/v1/responses` and `/v1/messages` have names. [Types](#types) has the fields of the types.
"""


def routes():
    """The OpenAPI document as a page: each route with its request, response and stream."""
    api = openapi_document()
    kinds = api["components"]["schemas"]
    lines = [ROUTES]
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            lines += route_section(method, path, route)
    # The types that the routes name, then those that these name, and so on.
    sections = {}
    text = "\n".join(lines)
    while more := {name for name in kinds if name not in sections and f"(#{name.lower()})" in text}:
        sections |= {name: type_section(name, kinds[name]) for name in more}
        text = "\n".join(sections[name] for name in more)
    return "\n".join([*lines, "## Types", "", "\n\n".join(text for _name, text in sorted(sections.items()))])


def named(schema):
    """The types of the document that a schema refers to, as links; also those of a list and of the events of a stream."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return [f"[`{name}`](#{name.lower()})"]
    if schema.get("type") == "array":
        return [f"list of {link}" for link in named(schema.get("items", {}))]
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("properties", {}).values()]
    parts += [schema.get("contentSchema"), schema.get("additionalProperties")]
    return [link for part in parts if isinstance(part, dict) for link in named(part)]


def content(what, media_type, schema):
    """A line for what a body of this media type may be."""
    links = ", or ".join(named(schema))
    return [f"**{what}**, `{media_type}`" + (f": {links}" if links else ""), ""]


def route_section(method, path, route):
    key = " 🔑" if route["security"] else ""
    lines = [f"## {method.upper()} {path}", "", f"{route['summary']}.{key}", ""]
    for media_type, body in route.get("requestBody", {}).get("content", {}).items():
        lines += content("Request", media_type, body["schema"])
        if "example" in body and media_type == "application/json":
            lines += ["```json", json.dumps(body["example"], indent=2, ensure_ascii=False), "```", ""]
    for media_type, body in route["responses"].get("200", {}).get("content", {}).items():
        what = "Stream" if media_type == "text/event-stream" else "Response"
        lines += content(what, media_type, body.get("schema", {}))
    return lines


def type_section(name, kind):
    fields = []
    for field, schema in kind.get("properties", {}).items():
        links = " or ".join(named(schema))
        fields.append(f"`{field}`" + (f" ({links})" if links else ""))
    return f"### {name}\n\n{', '.join(fields)}"


ROW = r"^(?!\|)"  # a line that is no row of a table
# The page, what makes a part of it, and where that part ends. It begins as what is made begins.
MADE = [
    ("api/tools.md", mistakes, ROW),
    ("architecture.md", files, ROW),
    ("architecture.md", layers, ROW),
    ("memory.md", sizes, ROW),
    ("metrics.md", metrics, ROW),
    ("models.md", served_families, ROW),
    ("neuron-families.md", neuron_models, ROW),
    ("routes.md", routes, r"\Z"),
    ("settings.md", settings, "^## Other variables$"),
    ("settings.md", other_names, ROW),
]


def pages():
    """Each page with what is made of the code as it is now."""
    made = {}
    for page, make, end in MADE:
        path = HERE / "docs" / page
        text = made.get(path) or path.read_text()
        part = make() + "\n"
        begin = text.index("\n".join(part.split("\n", 2)[:2]))
        rest = re.compile(end, re.MULTILINE).search(text, begin)
        made[path] = text[:begin] + part + text[rest.start() :]
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
