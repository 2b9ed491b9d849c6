"""The tables of docs/settings.md, made of the settings and of the names of other servers.

PYTHONPATH=. python tests/settings_tables.py --write     puts them there
"""

import json
import sys

from config import GROUPS, SETTINGS
from run import HERE

DOCUMENT = HERE / "docs" / "settings.md"


def settings() -> str:
    """A section with a table for each group."""
    rows = []
    for flag, entry in SETTINGS.items():
        if flag in GROUPS:
            rows += ["", f"## {GROUPS[flag]}", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in entry.metadata["names"])
        rows.append(f"| `{flag}` | {names} | {entry.metadata['shown']} | {entry.metadata['help']} |")
    return "\n".join(rows[1:])


def other_names() -> str:
    rows = ["| flags and variables | here |", "|---|---|"]
    for effect, table in json.loads((HERE / "compatibility_aliases.json").read_text()).items():
        for names, text in table.items():
            shown = ", ".join(f"`{name}`".replace("=", "` other than `") for name in names.split())
            rows.append(f"| {shown} | {effect.replace('_', ' ')}: {text} |")
    return "\n".join(rows)


def replaced(document: str, first: str, after: str, text: str) -> str:
    """The document with `text` from the line `first` up to the line `after`."""
    begin = document.index(first)
    return document[:begin] + text + "\n\n" + document[document.index(after, begin) :]


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        print(settings(), other_names(), sep="\n\n")
        return
    document = DOCUMENT.read_text() + "\n"
    first = "## " + next(iter(GROUPS.values()))
    document = replaced(document, first, "## Other variables\n", settings())
    head = other_names().splitlines()[0]
    DOCUMENT.write_text(document[: document.index(head)] + other_names() + "\n")


if __name__ == "__main__":
    main()
