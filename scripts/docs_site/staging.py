"""The sources that the generator reads: pages with their links led to the site, pages of source files, settings.

Rule: all problems are found before anything is built, and are told at once. Writes only below the folder it is given.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from . import addresses
from .navigation import HOME, INDEX, navigation
from .pages import blocks_of, digest, links_of, page_for_site, resolved, title_of
from .problems import SiteError
from .repository import Repository
from .source_pages import LARGEST, file_page, folder_page

THEME = Path(__file__).with_name("theme")


def stage(repository: Repository, folder: Path) -> None:
    """Writes the generator's sources and its settings into `folder`.

    Raises SiteError with every link that leads nowhere, diagram without its picture, and page that no kind has.
    """
    pages = repository.pages()
    problems = [*diagram_problems(repository, pages), *link_problems(repository, pages)]
    if problems:
        raise SiteError(problems)
    shown = navigation(page for page in pages if page != HOME)
    files = folder / "pages"
    for page, text in pages.items():
        write(files / addresses.address(page), page_for_site(page, text, repository.folders.__contains__))
    for picture in repository.pictures():
        write(files / addresses.address(picture), (repository.root / picture).read_bytes())
    linked = {resolved(page, target)[0] for page, text in pages.items() for _, target in links_of(text)}
    source_pages(repository, linked - set(pages) - set(repository.pictures()), files)
    shutil.copytree(THEME / "assets", files / "assets")
    write(folder / "theme" / "main.html", (THEME / "main.html").read_text())
    entries: list[dict[str, object]] = [{"Home": "index.md"}]
    for kind, members in shown:
        entries.append({kind.title: [entry(page, pages[page]) for page in members]})
    nav = ", ".join(toml(item) for item in entries)
    write(folder / "zensical.toml", (THEME / "zensical.toml").read_text().replace("nav = []", f"nav = [{nav}]"))


def entry(page: str, text: str) -> dict[str, str]:
    """A page in the navigation, under its first heading; the first one of a folder is its overview."""
    title = "Overview" if page.startswith("docs/") and page.endswith(f"/{INDEX}") else title_of(text, page)
    return {title: addresses.address(page)}


def toml(value: object) -> str:
    """A value of the settings as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def link_problems(repository: Repository, pages: Mapping[str, str]) -> list[str]:
    """A line for each link to what is not there, or cannot be shown."""
    problems = []
    for page, text in pages.items():
        for line, target in links_of(text):
            path, _ = resolved(page, target)
            if path in repository.folders or path in pages or path in repository.pictures():
                continue
            if path not in repository.files:
                problems.append(f"{page}:{line}: {target} leads to {path}, which the repository has not")
            elif (repository.root / path).stat().st_size > LARGEST:
                problems.append(f"{page}:{line}: {path} is larger than {LARGEST} bytes; link to its folder")
    return problems


def diagram_problems(repository: Repository, pages: Mapping[str, str]) -> list[str]:
    """A line for each diagram whose picture is absent, or shows an earlier text of it."""
    problems = []
    for page, text in pages.items():
        for number, block in enumerate((block for block in blocks_of(text) if block.language == "mermaid"), 1):
            picture = addresses.diagram(page, number)
            if picture not in repository.files or digest(block.text) not in repository.text(picture)[:400]:
                problems.append(f"{page}:{block.line}: {picture} does not show this diagram; run `make diagrams`")
    return problems


def source_pages(repository: Repository, linked: set[str], files: Path) -> None:
    """Writes a page for each source file and folder that is linked to."""
    shown = frozenset(linked & repository.files)
    for path in sorted(linked):
        if path in repository.files:
            write(files / addresses.address(path), file_page(path, repository.text(path)))
            continue
        below = [file for file in repository.files if file.startswith(f"{path}/")]
        inside = {file: readable(repository, file) for file in below if "/" not in file.removeprefix(f"{path}/")}
        folders = {file.removeprefix(f"{path}/").partition("/")[0] for file in below if file not in inside}
        write(files / addresses.address(path, folder=True), folder_page(path, inside, sorted(folders), shown))


def readable(repository: Repository, path: str) -> str:
    """The text of a Python module; nothing of other files, which may be no text."""
    return repository.text(path) if path.endswith(".py") else ""


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
