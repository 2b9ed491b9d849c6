"""The field's words: what a user reads uses the terms of vLLM's and TGI's documentation, not a private vocabulary."""

import ast
import re

from documents import FILES

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


def test_documents_have_the_fields_words():
    assert {document: words for document in DOCUMENTS if (words := found_in(document.read_text()))} == {}


def test_help_log_lines_and_errors_have_the_fields_words():
    assert [message for path in FILES for message in messages_of(path) if found_in(message)] == []
