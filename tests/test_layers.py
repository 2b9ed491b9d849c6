"""Imports go one way, and packages stay in the layers that they belong to (docs/architecture.md)."""

import ast
import subprocess
import sys

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
    "web": "api config run logs protocol text",
    "worker": "engine models text.grammar protocol config run logs",
}
ONLY_IN = {
    "flask": "web api",
    "gunicorn": "web api",
    "gevent": "web api",
    "zmq": "api.engine_client engine.link",
    "tokenizers": "text models.gguf models.tokenizer",
    "llguidance": "text.grammar text.json_patterns",
    "jinja2": "text",
    "PIL": "text.image_decoding text.image_layouts",
    "prometheus_client": "engine.metrics",
    "sqlite3": "api.response_store",
    "opentelemetry": "api.tracing",
    "numpy": "engine models",
    "numba": "engine",
    "torch": "models",
    "transformers": "models",
    "transformers_neuronx": "models.neuron_build models.neuron_graph",
    "openvino": "models",
    "huggingface_hub": "models.fetch",
}
FOLDERS = [name for name in MAY_IMPORT if (HERE / name).is_dir()]
FILES = [*HERE.glob("*.py"), *(path for folder in FOLDERS for path in HERE.glob(f"{folder}/*.py"))]


def imports_of(path):
    """Every module that a file imports, at its top or anywhere inside, as `folder.file` where it has both."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


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


def loaded_by(statement, *modules):
    """Which of the modules a process has loaded after the statement."""
    code = f"import sys; {statement}; print(*sorted(set({modules!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_a_web_process_loads_neither_torch_nor_numpy():
    assert loaded_by("import web", "torch", "transformers", "numpy", "numba", "openvino", "PIL") == []


def test_a_worker_on_a_cpu_loads_neither_torch_nor_transformers():
    heavy = ("torch", "transformers", "flask", "tokenizers", "PIL", "openvino")
    assert loaded_by("import worker, models.openvino_model", *heavy) == ["openvino"]
