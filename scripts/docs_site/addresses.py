"""Where something of the repository is on the site.

Rule: a pure function of the path. Pages of docs/ keep their names, so that an address of the site can be guessed from
the repository; whatever else a page links to (source files, folders) has a page of its own below `source/`.
"""

import posixpath

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "tests/cluster/README.md": "test-cluster.md"}
"""Pages outside docs/."""
DIAGRAMS = "docs/pictures/diagrams"
PICTURES = (".png", ".svg", ".gif", ".jpg")


def address(path: str, *, folder: bool = False) -> str:
    """The file of the site's sources that shows `path` of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith((".md", *PICTURES)):
        shown = path.removeprefix("docs/")
        return shown.removesuffix("README.md") + "index.md" if shown.endswith("/README.md") else shown
    return f"source/{path}/index.md" if folder else f"source/{path}.md"


def between(page: str, target: str) -> str:
    """The relative link from one file of the site's sources to another."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def diagram(page: str, number: int) -> str:
    """The picture of the diagram with this number, from 1, of a page of the repository."""
    name = page.removeprefix("docs/").removesuffix(".md").replace("/", "-")
    return f"{DIAGRAMS}/{name}-{number}.svg"
