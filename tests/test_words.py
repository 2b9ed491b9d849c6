"""The field's words: what a user reads uses the terms of vLLM's and TGI's documentation, not a private vocabulary."""

import ast
import re
import subprocess
import sys

import pytest

from run import HERE

# Words that have no other sense here, and the terms in their place.
BANNED = {
    r"guess(es|ed)?": "draft tokens, estimated",
    r"dialects?": "API",
    r"verbs?": "subcommand",
    r"hang-?ups?|hangs? up|hung up": "client disconnect",
    r"misspelt": "misspelled, unknown",
    r"honou?red": "supported",
    r"blanks": "spaces",
    r"understudy|rehearsal": "",
    r"the house": "the code base",
    r"ends the start": "fails at startup",
    r"first starts?": "first startup",
    r"compiled programs?": "compiled graphs",
    r"forced calls?": "required tool call",
}
WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
DOCUMENTS = [path for folder in (".", "bench", "docs", "docs/*", "deploy/*") for path in HERE.glob(f"{folder}/*.md")]
SOURCES = [path for folder in (".", "api", "text", "engine", "models") for path in sorted(HERE.glob(f"{folder}/*.py"))]


def found_in(text):
    """The banned words of a text, without names in code and addresses."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", " ", text, flags=re.DOTALL)
    return sorted({match[0].lower() for match in WORDS.finditer(prose)})


def messages_of(path):
    """The texts in a file that are no docstrings: help, log lines, errors."""
    tree = ast.parse(path.read_text())
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings and " " in node.value:
            yield node.value


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(HERE)))
def test_documents_have_the_fields_words(document):
    assert found_in(document.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(HERE)))
def test_help_log_lines_and_errors_have_the_fields_words(path):
    assert [message for message in messages_of(path) if found_in(message)] == []


def test_the_help_of_the_command_line_has_the_fields_words():
    done = subprocess.run([sys.executable, HERE / "config.py", "--help"], capture_output=True, text=True, check=True)
    assert found_in(done.stdout) == []
