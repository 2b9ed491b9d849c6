"""The house rules: imports go one way, packages stay in the layers that they belong to, and the documents
name what is there."""

import ast
import re
import subprocess
import sys
from functools import cache

import pytest

import config
from config import HERE

MAY_IMPORT = {
    "web": {"logs", "answers", "bodies", "engine_client", "errors", "generation", "grammar", "handlers", "openapi"}
    | {"schema", "text", "tracing", "validate", "protocol", "config"},
    "tracing": {"generation", "protocol", "config"},
    "bodies": {"errors", "config"},
    "handlers": {"answers", "chat", "engine_client", "errors", "grammar", "readers", "responses", "schema", "text", "tools"}
    | {"validate", "protocol", "config"},
    "generation": {"answers", "engine_client", "errors", "text", "validate", "protocol"},
    "responses": {"answers", "errors", "readers", "schema", "text", "validate"},
    "answers": {"errors", "readers", "schema", "text", "validate", "protocol", "config"},
    "validate": {"errors", "formats", "readers", "schema", "protocol", "config"},
    "tools": {"chat", "errors", "grammar", "readers", "schema", "text"},
    "readers": {"text"},
    "formats": {"errors", "grammar", "schema"},
    "grammar": set(),
    "openapi": {"schema", "config"},
    "errors": {"schema"},
    "engine_client": {"protocol"},
    "schema": {"protocol", "config"},
    "text": {"chat", "escaping", "config"},
    "escaping": set(),
    "chat": {"config"},
    "templates": set(),
    "protocol": set(),
    "config": {"checks", "logs"},
    "checks": set(),
    "logs": set(),
    "worker": {
        "checks",
        "logs",
        "grammar",
        "masks",
        "metrics",
        "outputs",
        "profiling",
        "sampling",
        "scheduler",
        "protocol",
        "config",
    }
    | {"models", "models.base", "models.fetch", "models.tokenizer"},
    "profiling": {"outputs", "protocol", "models.base", "config"},
    "metrics": {"outputs", "scheduler", "protocol"},
    "masks": {"grammar", "protocol"},
    "outputs": {"grammar", "sampling", "scheduler", "protocol", "models.base", "config"},
    "scheduler": {"models.base", "slots"},
    "slots": set(),
    "sampling": set(),
    "models": {"models.cpu", "models.neuron", "models.torch_model", "models.fetch", "models.base", "config"},
    "models.base": set(),
    "models.fetch": {"models.base", "checks", "config"},
    "models.tokenizer": {"models.cache", "models.fetch", "models.base", "config"},
    "models.cpu": {"models.torch_model", "models.cache", "models.base", "config"},
    "models.cache": {"config"},
    "models.convert": {"logs", "models.cpu", "models.cache", "models.torch_model", "models.base", "config"},
    "models.torch_model": {"models.cpu", "models.base", "checks", "config"},
    "models.neuron": {"models.artifact", "models.checkpoint", "models.plan", "models.machine", "models.fetch"}
    | {"models.base", "checks", "config"},
    "models.compile": {"logs", "models.neuron", "models.artifact", "models.machine", "models.fetch", "models.base", "config"},
    "models.plan": {"models.checkpoint", "models.machine", "models.fetch", "models.base", "config"},
    "models.artifact": {"models.cache", "config"},
    "models.checkpoint": {"models.base"},
    "models.machine": {"config"},
}
ONLY_IN = {
    "flask": {"web", "bodies"},
    "gunicorn": {"web", "bodies"},
    "gevent": {"web", "bodies", "generation", "engine_client", "tracing"},
    "socket": {"web", "bodies", "generation"},
    "zmq": {"protocol", "engine_client"},
    "msgspec": {"models.artifact", "answers", "engine_client", "formats", "handlers", "openapi", "readers", "responses"}
    | {"schema", "validate", "protocol", "worker"},
    "tokenizers": {"text", "escaping"},
    "llguidance": {"grammar"},
    "jinja2": {"templates"},
    "prometheus_client": {"metrics"},
    "opentelemetry": {"tracing"},
    "numba": {"sampling"},
    "torch": {"models", "models.torch_model", "models.convert", "models.neuron"},
    "transformers": {"models.torch_model", "models.convert", "models.tokenizer"},
    "transformers_neuronx": {"models.neuron"},
    "openvino": {"models.cpu", "models.convert"},
    "nncf": {"models.convert"},
    "huggingface_hub": {"models.fetch"},
}
FILES = {path.stem: path for path in HERE.glob("*.py")}
FILES |= {f"models.{path.stem}".removesuffix(".__init__"): path for path in HERE.glob("models/*.py")}


@cache
def tree(module):
    return ast.parse(FILES[module].read_text())


@cache
def imports_of(module):
    """Every module that a file imports, at its top or anywhere inside: those of this house by their whole name."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(FILES)
            found |= submodules or {node.module}
    return {name if name in FILES else name.split(".")[0] for name in found}


def loaded_by(statement, *modules):
    """Which of the modules a process has loaded after the statement."""
    code = f"import sys; {statement}; print(*sorted(set({modules!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_every_file_is_under_the_rules():
    assert set(FILES) == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_imports_go_one_way(module):
    assert imports_of(module) & set(FILES) <= MAY_IMPORT[module]


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_used_by_the_layers_that_it_belongs_to_and_by_no_other(package):
    assert {module for module in FILES if package in imports_of(module)} == ONLY_IN[package]


def test_a_web_process_loads_neither_torch_nor_numpy():
    assert loaded_by("import web", "torch", "transformers", "numpy", "numba", "openvino") == []


def test_a_worker_on_a_cpu_loads_neither_torch_nor_transformers():
    assert loaded_by("import worker, models.cpu", "torch", "transformers", "flask", "tokenizers", "openvino") == ["openvino"]


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_file_says_in_its_first_lines_what_it_owns(module):
    assert len(ast.get_docstring(tree(module)).splitlines()) >= 3


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_no_file_has_more_than_600_lines(module):
    assert len(FILES[module].read_text().splitlines()) <= 600


def test_the_architecture_names_functions_that_are_there():
    named = re.findall(r"`((?:models/)?\w+)\.py: ([\w.]+)", (HERE / "docs" / "architecture.md").read_text())
    assert len(named) > 15
    for module, path in named:
        node = tree(module.replace("/", ".").removesuffix(".__init__"))
        for name in path.split("."):
            names = {each.name: each for each in node.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
            names |= {ast.unparse(each.targets[0]): each for each in node.body if isinstance(each, ast.Assign)}
            assert name in names, f"{module}.py has no {path}"
            node = names[name]


def test_the_version_is_in_pyproject_toml_too():
    assert f'version = "{config.VERSION}"' in (HERE / "pyproject.toml").read_text()
