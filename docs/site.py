"""A hook of mkdocs: READMEs and pages of the root become pages of the site, and links lead where they lead on
GitHub.

Links, alerts and sections that are tabs here are written for GitHub. The repository shows what is not on the
site.
"""

import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "bench" / "README.md", ROOT / "demo" / "README.md", *ROOT.glob("deploy/*/README.md")]
OUTSIDE = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *READMES)]
# Path in the repository → page of the site.
PAGES = {path: "index.md" if path == "README.md" else path.replace("/README.md", ".md") for path in OUTSIDE}
SOURCES = {page: path for path, page in PAGES.items()}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)  # images of other hosts
TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->", re.DOTALL)
ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n)+)", re.MULTILINE)


def on_files(files, config, **_):
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def with_tabs(section):
    """Headings of the third level as tabs of the theme."""
    lines = []
    for line in section[1].splitlines():
        lines.append(f'=== "{line[4:]}"' if line.startswith("### ") else f"    {line}".rstrip())
    return "\n".join(lines)


def with_admonition(alert):
    """An alert as GitHub writes it, `> [!NOTE]`, as an admonition of the theme."""
    text = re.sub(r"^> ?", "    ", alert[2], flags=re.MULTILINE)
    return f"!!! {alert[1].lower()}\n\n{text}"


def on_page_markdown(markdown, page, config, **_):
    here = page.file.src_uri
    folder = (ROOT / SOURCES.get(here, f"docs/{here}")).parent

    def on_site(link):
        path = PurePosixPath((folder / link[1]).resolve().relative_to(ROOT)).as_posix()
        if path in PAGES:
            target = PAGES[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        else:
            return f"]({config.extra['repository']}/blob/main/{path}"
        return f"]({os.path.relpath(target, os.path.dirname(here) or '.')}"

    markdown = BADGES.sub("", markdown)
    markdown = TABS.sub(with_tabs, markdown)
    markdown = ALERT.sub(with_admonition, markdown)
    return LINK.sub(on_site, markdown)
