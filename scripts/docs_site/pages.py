"""A page of the repository as a page of the site.

Rule: pure functions of the text. The words stay as they are; only what the site shows differently changes: where links
lead, diagrams, which become pictures, and lists right after a paragraph, which the generator takes for the paragraph's.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import addresses

FENCE = re.compile(r"^( *)(```+|~~~+)(.*)$")
LINK = re.compile(r"(?<=\])\(([^)\s]+)\)")
CODE = re.compile(r"(`+)(?:(?!\1).)*\1")
ITEM = re.compile(r"^ *([-*]|\d+\.) ")
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True)
class Line:
    """A line with what it is part of: `language` of the fenced block, its fences included, or None in prose."""

    number: int
    text: str
    language: str | None


@dataclass(frozen=True)
class FencedBlock:
    """A fenced block: the line of its opening fence, its language, the lines between, and the marker above it."""

    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def lines_of(text: str) -> Iterator[Line]:
    """Every line of a page, in order."""
    fence, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if fence:
            yield Line(number, line, language)
            if found and found[2].startswith(fence) and not found[3].strip():
                fence = ""
        elif found:
            fence, language = found[2], found[3].strip()
            yield Line(number, line, language)
        else:
            yield Line(number, line, None)


def blocks_of(text: str) -> tuple[FencedBlock, ...]:
    """The fenced blocks of a page, without the indentation of their fences."""
    blocks: list[FencedBlock] = []
    fence, indent = "", 0
    opened: tuple[int, str] = (0, "")
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if fence and found and found[2].startswith(fence) and not found[3].strip():
            blocks.append(FencedBlock(*opened, tuple(body)))
            fence = ""
        elif fence:
            body.append(line[indent:] if line[:indent].isspace() else line)
        elif found:
            fence, indent, opened, body = found[2], len(found[1]), (number, found[3].strip()), []
    return tuple(blocks)


def links_of(text: str) -> list[tuple[int, str]]:
    """The links of a page to files, with their lines; those to other hosts are not among them."""
    found = []
    for line in lines_of(text):
        if line.language is None:
            for target in LINK.findall(CODE.sub(lambda match: " " * len(match[0]), line.text)):
                found += [] if EXTERNAL.match(target) else [(line.number, target)]
    return found


def resolved(page: str, target: str) -> tuple[str, str]:
    """A link's path in the repository, and its anchor; the path is the page's own where only an anchor is given."""
    path, _, anchor = target.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page), anchor


def page_for_site(page: str, text: str, is_folder: Callable[[str], bool]) -> str:
    """The page `page` of the repository, which says `text`, as the site's generator reads it."""
    own = addresses.address(page)

    def link(match: re.Match[str]) -> str:
        if EXTERNAL.match(match[1]) or match[1].startswith("#"):
            return match[0]
        path, anchor = resolved(page, match[1])
        there = addresses.address(path, folder=is_folder(path))
        if there.startswith("source/"):
            anchor = ""
        return f"({addresses.between(own, there)}{'#' + anchor if anchor else ''})"

    shown: list[str] = []
    before: str = ""
    diagrams = 0
    for line in lines_of(text):
        if line.language == "mermaid":
            if FENCE.match(line.text) and line.text.strip() != "```":
                diagrams += 1
                picture = addresses.address(addresses.diagram(page, diagrams))
                shown.append(f"![diagram]({addresses.between(own, picture)}){{ .diagram }}")
            continue
        if line.language is not None:
            shown.append(line.text)
        else:
            if ITEM.match(line.text) and before.strip() and not ITEM.match(before) and not before.startswith(" "):
                shown.append("")
            shown.append(outside_code(line.text, lambda prose: LINK.sub(link, prose)))
        before = line.text
    return "\n".join(shown) + "\n"


def outside_code(line: str, change: Callable[[str], str]) -> str:
    """The line with `change` applied to it, and what stands between backticks as it was."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    changed = change(CODE.sub(keep, line))
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], changed)


def title_of(text: str, otherwise: str) -> str:
    """The page's first heading, without its marks."""
    for line in lines_of(text):
        if line.language is None and line.text.startswith("# "):
            return line.text.removeprefix("# ").replace("`", "").strip()
    return otherwise


def digest(diagram: str) -> str:
    """By which a picture of a diagram says what it shows."""
    return hashlib.sha256(diagram.encode()).hexdigest()[:16]
