"""The tables of docs/settings.md, made of the settings and of the names of other servers.

PYTHONPATH=. python tests/settings_tables.py     prints them
"""

import json

from config import SETTINGS
from run import HERE


def settings() -> str:
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for flag, entry in SETTINGS.items():
        names = ", ".join(f"`{name}`" for name in entry.metadata["names"])
        rows.append(f"| `{flag}` | {names} | {entry.metadata['shown']} | {entry.metadata['help']} |")
    return "\n".join(rows)


def other_names() -> str:
    rows = ["| flags and variables | here |", "|---|---|"]
    for effect, table in json.loads((HERE / "compatibility_aliases.json").read_text()).items():
        for names, text in table.items():
            shown = ", ".join(f"`{name}`".replace("=", "` other than `") for name in names.split())
            rows.append(f"| {shown} | {effect.replace('_', ' ')}: {text} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings(), other_names(), sep="\n\n")
