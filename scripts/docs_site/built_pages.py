"""What the built site is, as a browser meets it: every link and anchor leads somewhere, and nothing comes from afar.

Rule: it looks at the files of the site alone, and so knows nothing of the generator: what that overlooks is found here.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "link": ("href",),
    "form": ("action",),
}
"""What a browser fetches by itself, or sends to."""
NAMED = {"canonical", "alternate", "prev", "next", "edit"}
"""Relations of a `link` that a browser does not fetch."""
ON_DEMAND = {"mermaid": "a diagram", "glightbox": "a light box", "md-exec": "a runnable example"}
"""Classes for whose elements the generator's script fetches a library from another host."""
STYLE_ADDRESS = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^)'\"\s]+)")


@dataclass
class Page:
    """One HTML file: its anchors, what it links to, and what it loads, each with its line."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[int, str]] = field(default_factory=list)
    loads: list[tuple[int, str]] = field(default_factory=list)
    on_demand: list[tuple[int, str]] = field(default_factory=list)


class TagReader(HTMLParser):
    """Fills a Page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        self.page.anchors |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.page.links.append((line, said["href"]))
        if tag == "link" and NAMED & set(said.get("rel", "").split()):
            return
        for name in LOADED.get(tag, ()):
            parts = said.get(name, "").split(",") if name == "srcset" else [said.get(name, "")]
            self.page.loads += [(line, part.split()[0]) for part in parts if part.strip()]
        for word in ON_DEMAND.keys() & set(said.get("class", "").split()):
            self.page.on_demand.append((line, ON_DEMAND[word]))


def problems_of(site: Path) -> list[str]:
    """A line for each link, anchor or picture that leads nowhere, and for each thing that comes from another host."""
    pages: dict[str, Page] = {}
    files = {os.path.relpath(path, site) for path in site.rglob("*") if path.is_file()}
    for name in sorted(files):
        if name.endswith(".html"):
            reader = TagReader()
            reader.feed((site / name).read_text())
            pages[name] = reader.page
    problems = []
    for name, page in pages.items():
        problems += [
            f"{name}:{line}: {what} would be drawn by a library from another host" for line, what in page.on_demand
        ]
        problems += [
            f"{name}:{line}: loads {what} from another host" for line, what in page.loads if is_elsewhere(what)
        ]
        for line, target in [*page.links, *page.loads]:
            problem = dead(name, target, files, pages)
            if problem:
                problems.append(f"{name}:{line}: {problem}")
    for name in sorted(file for file in files if file.endswith(".css")):
        found = STYLE_ADDRESS.findall((site / name).read_text())
        problems += [f"{name}: loads {what} from another host" for what in found]
    return problems


def is_elsewhere(target: str) -> bool:
    """Whether this is an address on another host."""
    parts = urlsplit(target)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def dead(page: str, target: str, files: set[str], pages: dict[str, Page]) -> str:
    """Why a link of a page leads nowhere; empty when it leads somewhere, or to another host."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    path = unquote(parts.path)
    if path.startswith("/"):
        return f"{target} is a path of the host, and the site may be anywhere on it"
    there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    if path in (".", "./") or path.endswith("/") or there == ".":
        there = posixpath.normpath(posixpath.join(there, "index.html"))
    if there not in files:
        return f"{target} leads to {there}, which the site has not"
    if parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
        return f"{target}: {there} has no anchor {parts.fragment}"
    return ""
