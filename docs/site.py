"""A hook of mkdocs: the README is the site's first page, and links lead where they lead on GitHub.

Links are written for GitHub. The site has the documents of this folder; what lies elsewhere is shown by the
repository.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
HOME = "index.md"
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files, config, **_):
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown, page, config, **_):
    folder = ROOT if page.file.src_uri == HOME else ROOT / "docs"

    def on_site(link):
        path = PurePosixPath((folder / link[1]).resolve().relative_to(ROOT))
        if path == PurePosixPath("README.md"):
            target = HOME
        elif path.is_relative_to("docs"):
            target = path.relative_to("docs")
        else:
            target = f"{config.extra['repository']}/blob/main/{path}"
        return f"]({target}"

    return LINK.sub(on_site, markdown)
