"""`make docs`: builds a site from docs/ and the pages of OUTSIDE.

Owns what the generator cannot do: links out of docs/ lead to copies of their targets, and diagrams become the pictures
drawn by `draw_diagrams.py`. Settings and navigation are in zensical.toml; the generator's `--strict` checks anchors.
Must never change the existing site unless the new one has no problem.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "tests/cluster/README.md": "test-cluster.md"}
"""Page outside docs/ -> its name on the site."""
PICTURES = "docs/pictures/diagrams"
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"(^ *(?:`{4}.*?`{4}|```(?!`).*?^ *```)$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`[^`\n]+`)")
LINK = re.compile(r"(?<=\])\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
LIST = re.compile(r"^(?! *(?:[-*]|\d+\.) | |$)(.+\n)(?= *(?:[-*]|\d+\.) )", re.MULTILINE)
"""Line of a paragraph directly before a list; the generator needs an empty line between them."""


def pages(root: Path) -> dict[str, str]:
    """Return the path and text of every page of the site."""
    found = [*(root / "docs").rglob("*.md"), *(root / path for path in OUTSIDE if (root / path).exists())]
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(found)}


def diagrams(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the picture, the text and its digest of each diagram."""
    for page, text in pages(root).items():
        for number, diagram in enumerate(MERMAID.findall(text), 1):
            yield root / picture(page, number), diagram, hashlib.sha256(diagram.encode()).hexdigest()[:16]


def picture(page: str, number: int) -> str:
    """Return the path of the picture of a page's diagram number `number`, from 1."""
    return f"{PICTURES}/{page.removeprefix('docs/').removesuffix('.md').replace('/', '-')}-{number}.svg"


def address(path: str) -> str:
    """Return the file of the site's sources that shows `path` of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and posixpath.splitext(path)[1] in (".md", ".png", ".svg"):
        return re.sub(r"(^|/)README\.md$", r"\1index.md", path.removeprefix("docs/"))
    return f"source/{path}.txt"


def for_site(page: str, text: str, named: set[str]) -> str:
    """Return a page as the generator reads it, and add the paths that it links to to `named`."""
    beside = posixpath.dirname(address(page)) or "."

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
        named.add(path)
        there = address(path)
        anchor = (match[2] or "") if there.endswith(".md") else ""
        return f"({posixpath.relpath(there, beside)}{anchor})"

    number = 0
    parts = FENCED.split(text)
    for place, part in enumerate(parts):
        if part.startswith("```mermaid"):
            number += 1
            parts[place] = f"![diagram]({posixpath.relpath(address(picture(page, number)), beside)}){{ .diagram }}"
        elif place % 2 == 0:
            pieces = CODE.split(LIST.sub(r"\1\n", part))
            pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
            parts[place] = "".join(pieces)
    return "".join(parts)


def stage(root: Path, folder: Path) -> list[str]:
    """Write the generator's sources and settings into `folder`; return the problems of the pages."""
    texts, sources = pages(root), folder / "pages"
    problems = [
        f"{drawn.relative_to(root)} does not show its diagram; run `make diagrams`"
        for drawn, _, digest in diagrams(root)
        if not drawn.exists() or digest not in drawn.read_text()[:400]
    ]
    shutil.copytree(root / "docs", sources, ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(FOLDER / "theme", folder / "theme")
    shutil.move(folder / "theme" / "assets", sources / "assets")
    for page, text in texts.items():
        named: set[str] = set()
        write(sources / address(page), for_site(page, text, named))
        problems += [f"{page}: {path} is not in the repository" for path in named if not (root / path).exists()]
        for path in (path for path in named if address(path).startswith("source/") and (root / path).exists()):
            if (root / path).is_dir():
                write(sources / address(path), "\n".join(sorted(child.name for child in (root / path).iterdir())))
            else:
                write(sources / address(path), (root / path).read_text())
    settings = (FOLDER / "zensical.toml").read_text()
    shown = {address(page) for page in texts}
    settings = re.sub(r'"([\w-]+)/\*"', lambda match: in_folder(match[1], shown), settings)
    problems += [f"{page}: name it in zensical.toml" for page in sorted(shown) if f'"{page}"' not in settings]
    write(folder / "zensical.toml", settings)
    return problems


def in_folder(folder: str, shown: set[str]) -> str:
    """Return the pages of a folder as navigation entries, its main page first."""
    found = sorted(
        (page for page in shown if posixpath.dirname(page) == folder),
        key=lambda page: (not page.endswith("/index.md"), page),
    )
    return ", ".join(f'"{page}"' for page in found)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def build(root: Path, site: Path) -> str:
    """Build the site of the repository at `root` into the folder `site`; return the problem, or an empty string."""
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=site.parent) as scratch:
        problems = stage(root, Path(scratch))
        if problems:
            return "\n".join(problems)
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
        environment = os.environ | {"NO_COLOR": "1"}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return COLORS.sub("", done.stdout + done.stderr)
        # A page for missing pages can link only by absolute paths, and the site may be in any folder of a host.
        (Path(scratch) / "site" / "404.html").unlink(missing_ok=True)
        shutil.rmtree(site, ignore_errors=True)
        (Path(scratch) / "site").rename(site)
    return ""


if __name__ == "__main__":
    sys.exit(build(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site") or None)
