"""Imports go one way, and packages stay in the layers that they belong to (docs/architecture.md)."""

import ast
import subprocess
import sys

import pytest
from documents import FILES

from run import HERE

# By folder, or file at the root: what it may import of this house beside itself.
MAY_IMPORT = {
    "run": "",
    "logs": "",
    "protocol": "",
    "manifest": "run",
    "config": "manifest run logs",
    "text": "manifest run",
    "models": "config manifest run logs",
    "engine": "models text.grammar protocol config manifest run",
    "api": "text protocol config run logs",
    "web": "api config run protocol text",
    "worker": "engine models text.grammar protocol config run",
}
ONLY_IN = {
    "flask": "web api",
    "gunicorn": "web api",
    "gevent": "web api",
    "zmq": "api.http.engine_client engine.link",
    "tokenizers": "text models.checkpoint.tokenizer models.gguf.tokenizer models.openvino.check_text",
    "llguidance": "text.grammar text.json_patterns",
    "jinja2": "text",
    "PIL": "text.images.decoding text.images.layouts",
    "prometheus_client": "engine.metrics",
    "sqlite3": "api.http.response_store",
    "opentelemetry": "api.generation.tracing",
    "numpy": "engine models",
    "numba": "engine",
    "torch": "models",
    "transformers": "models",
    "transformers_neuronx": "models.neuron.build models.neuron.graph models.neuron.recurrent",
    "openvino": "models",
    "huggingface_hub": "models.checkpoint.fetch",
}
# The files and folders of a folder, the top floor first: each imports from floors below alone.
FLOORS = {
    "api": "routes | openapi | tokenize clouds status | openai anthropic tgi adapter_routes | server chats | generation | http",
    "text": "output | infill stream | tokenizer template_capabilities grammar | json_schema template images"
    " | json_numbers json_patterns escaping limited",
    "engine": "lifecycle | adapter_changes outputs preparation | image_encoding link | metrics profiling | step | scheduler"
    " | request | admission defaults slots sampling",
    "models": "convert | __init__ | openvino pytorch neuron | checkpoint | base | adapters cache gguf states"
    " | accuracy child errors images machine",
}
MOST_FILES = 16  # of a folder, without those of its folders


def module_of(path):
    return ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports_of(path):
    """Every module that a file imports, at its top or anywhere inside, as `folder.file` where it has both."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if name in MODULES else node.module


def is_in(module, places):
    return any(f"{module}.".startswith(f"{place}.") for place in places.split())


def forbidden(path):
    """What a file imports that its layer may not."""
    *folder, name = path.relative_to(HERE).with_suffix("").parts
    layer = folder[0] if folder else name
    for module in imports_of(path):
        top = module.partition(".")[0]
        runs_up = top in MAY_IMPORT and top != layer and not is_in(module, MAY_IMPORT[layer])
        if runs_up or (top in ONLY_IN and not is_in(".".join([*folder, name]), ONLY_IN[top])):
            yield module


def test_imports_go_one_way_and_packages_stay_in_their_layers():
    assert {path: modules for path in FILES if (modules := [*forbidden(path)])} == {}


def place_of(module):
    """The folder that a module is in, and the file or folder of it."""
    return [*module.split("."), "__init__"][:2]


@pytest.mark.parametrize("folder", FLOORS)
def test_what_a_folder_holds_imports_from_the_floors_below_it_alone(folder):
    floor_of = {name: n for n, names in enumerate(FLOORS[folder].split(" | ")) for name in names.split()}
    own = [module for module in MODULES if place_of(module)[0] == folder]
    assert {place_of(module)[1] for module in own} - {"__init__"} == floor_of.keys() - {"__init__"}
    for module in own:
        name = place_of(module)[1]
        below = {place_of(other)[1] for other in imports_of(MODULES[module]) if other in own} - {name}
        assert [other for other in below if floor_of[name] >= floor_of.get(other, 99)] == [], module


def test_no_file_imports_itself_by_any_way_round():
    imports = {module: {each for each in imports_of(path) if each in MODULES} for module, path in MODULES.items()}
    assert [module for module in MODULES if module in closure(imports, module)] == []


def closure(imports, module):
    """All modules that a module imports, and that these import."""
    seen, waiting = set(), [module]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_folder_has_more_files_than_a_reader_takes_in():
    folders = {path.parent for path in FILES}
    assert {folder: count for folder in folders if (count := len(list(folder.glob("*.py")))) > MOST_FILES} == {}


def loaded_by(statement, *modules):
    """Which of the modules a process has loaded after the statement."""
    code = f"import sys; {statement}; print(*sorted(set({modules!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_a_web_process_loads_neither_torch_nor_numpy():
    assert loaded_by("import web", "torch", "transformers", "numpy", "numba", "openvino", "PIL") == []


def test_a_worker_on_a_cpu_loads_neither_torch_nor_transformers():
    heavy = ("torch", "transformers", "flask", "tokenizers", "PIL", "openvino")
    assert loaded_by("import worker, models.openvino.model", *heavy) == ["openvino"]


def test_keys_of_gguf_files_are_read_without_torch_and_transformers():
    heavy = ("torch", "transformers", "gguf", "openvino", "sentencepiece")
    assert loaded_by("import models.gguf.tokenizer, models.gguf.container", *heavy) == []
