"""The house rules: imports go one way, web processes carry no torch, and the README tells the truth about the settings."""

import ast
import subprocess
import sys

import pytest

import config
from config import HERE

MAY_IMPORT = {
    "web": {"answers", "connections", "schema", "text", "protocol", "config"},
    "answers": {"schema", "text", "protocol", "config"},
    "connections": set(),
    "worker": {"metrics", "logits", "sampling", "rehearsal", "model", "torch_model", "neuron_model", "protocol", "config"},
    "torch_model": {"decoder", "cuda_graphs", "hub", "model", "config"},
    "decoder": {"kernels"},
    "kernels": set(),
    "cuda_graphs": set(),
    "neuron_model": {"artifact", "model", "plan", "config"},
    "export": {"artifact", "neuron_model", "model", "plan", "config"},
    "artifact": {"config"},
    "metrics": {"protocol"},
    "sampling": {"logits", "protocol"},
    "rehearsal": {"protocol"},
    "logits": set(),
    "schema": {"protocol", "config"},
    "text": {"config"},
    "model": {"hub", "config"},
    "plan": {"hub", "config"},
    "hub": set(),
    "protocol": set(),
    "config": set(),
}
NEVER = {
    "config": {"flask", "gunicorn", "socket", "zmq", "torch", "transformers"},
    "schema": {"flask", "gunicorn", "zmq", "torch", "transformers"},
    "text": {"flask", "gunicorn", "socket", "zmq", "torch", "transformers"},
    "answers": {"flask", "gunicorn", "socket", "zmq", "torch", "transformers"},
    "web": {"torch", "transformers", "numpy", "prometheus_client"},
    "connections": {"flask", "zmq", "msgspec", "torch", "transformers"},
    "metrics": {"zmq", "socket", "torch", "transformers", "flask"},
    "protocol": {"flask", "gunicorn", "torch", "transformers"},
    "worker": {"flask", "gunicorn", "tokenizers", "transformers"},
    "sampling": {"zmq", "socket", "flask", "transformers"},
    "rehearsal": {"zmq", "socket", "flask", "transformers"},
    "logits": {"zmq", "socket", "flask", "msgspec", "transformers"},
    "model": {"flask", "gunicorn", "zmq", "msgspec"},
    "torch_model": {"flask", "gunicorn", "zmq", "msgspec", "transformers_neuronx"},
    "decoder": {"flask", "gunicorn", "zmq", "msgspec", "transformers", "transformers_neuronx"},
    "kernels": {"flask", "gunicorn", "zmq", "msgspec", "transformers", "transformers_neuronx"},
    "cuda_graphs": {"flask", "gunicorn", "zmq", "msgspec", "transformers", "transformers_neuronx"},
    "neuron_model": {"flask", "gunicorn", "zmq", "msgspec", "transformers"},
    "export": {"flask", "gunicorn", "zmq", "msgspec", "transformers"},
    "hub": {"flask", "gunicorn", "zmq", "msgspec", "torch", "transformers"},
    "artifact": {"flask", "gunicorn", "zmq", "msgspec", "torch", "transformers", "transformers_neuronx"},
}


def imports_of(module):
    """Every module that a file imports, at its top or anywhere inside."""
    found = set()
    for node in ast.walk(ast.parse((HERE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_every_layer_is_under_the_rules():
    assert {path.stem for path in HERE.glob("*.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_imports_go_one_way(module):
    assert imports_of(module) & set(MAY_IMPORT) <= MAY_IMPORT[module]


@pytest.mark.parametrize("module", NEVER)
def test_a_layer_does_not_know_what_is_none_of_its_business(module):
    assert not imports_of(module) & NEVER[module]


def test_nothing_but_the_model_layers_imports_transformers():
    assert {module for module in MAY_IMPORT if "transformers" in imports_of(module)} == {"model", "torch_model"}
    assert {module for module in MAY_IMPORT if "transformers_neuronx" in imports_of(module)} == {"neuron_model"}


def test_a_web_process_does_not_load_torch():
    code = "import sys, web; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_file_says_in_its_first_lines_what_it_owns(module):
    assert len(ast.get_docstring(ast.parse((HERE / f"{module}.py").read_text())).splitlines()) >= 3


def test_the_readme_has_the_table_of_settings_as_it_is():
    assert config.markdown_table() in (HERE / "README.md").read_text()


def test_the_version_is_told_once():
    assert f'version = "{config.VERSION}"' in (HERE / "pyproject.toml").read_text()
