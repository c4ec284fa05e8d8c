"""The documentation holds together: its links lead somewhere, and its pictures show the states that the code has."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def pages() -> tuple[Path, ...]:
    """Return every page that is kept in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()] or [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return tuple(path for path in paths if path.is_file())


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings have on the web."""
    made = set()
    for heading in HEADING.findall(without_code(page.read_text())):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        made.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return made


def test_links_lead_to_a_file_and_to_a_heading_of_it() -> None:
    broken = []
    for page in pages():
        for target in LINK.findall(without_code(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)
