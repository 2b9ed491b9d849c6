"""python tests/architecture_table.py: the table of files in docs/architecture.md; with --write it puts the table there.

A row is a Python file, with the first sentence of its docstring."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
HEAD = "| file | what it is |\n|---|---|"


def first_sentence(path):
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"\.(?: |$)", text)[0].replace("|", "\\|")


def table():
    paths = [path for folder in ("", "api", "text", "engine", "models") for path in sorted((ROOT / folder).glob("*.py"))]
    return "\n".join([HEAD, *(f"| `{path.relative_to(ROOT)}` | {first_sentence(path)} |" for path in paths)])


def write():
    before, _, after = DOCUMENT.read_text().partition("\n## Files\n")
    rest = re.sub(r"\A\n(\|.*\n)+", "", after)
    DOCUMENT.write_text(f"{before}\n## Files\n\n{table()}\n{rest}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(table())
