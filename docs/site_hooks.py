"""Hooks of the documentation site: pages that are not in its folder, and links between pages."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Search in a folder that no server serves needs this script. `make docs` fetches it.
SHIM, SHIM_HERE = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
SHIM_FETCHED = ROOT / ".venv" / "package" / "shim" / "index.js"
CHARTS = "small_codes.html"
_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, where GitHub looks for them, and the charts of small codes."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.small_codes_page import page

    files.append(File.generated(config, CHARTS, content=page()))
    for source, name in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=content))
    if SHIM_FETCHED.exists():
        files.append(File.generated(config, SHIM_HERE, abs_src_path=str(SHIM_FETCHED)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the script for search from the site rather than from the network."""
    here = posixpath.relpath(SHIM_HERE, posixpath.dirname(page.file.src_uri) or ".")
    return output.replace(SHIM, here) if SHIM_FETCHED.exists() else output


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages of the site; a file of the checkout is named instead."""
    here = posixpath.dirname(page.file.src_uri)
    folder = "" if page.file.src_uri in PAGES.values() else posixpath.join("docs", here)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, path))
        if file in PAGES or file.startswith("docs/"):
            target = posixpath.relpath(PAGES.get(file, file.removeprefix("docs/")), here or ".")
            return f"[{text}]({target}{mark}{anchor})"
        return f"{text} (`{file}`)"

    return _LINK.sub(link, markdown).replace("<details>", '<details markdown="1">')
