"""Which kind a page is of, and so where the site shows it.

Owns the order of the navigation. Rule: a pure function of the paths that are there; a page below a folder of a kind is
of that kind by itself, any other page is named here. A page that nobody names is an error, never left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .problems import SiteError

HOME = "README.md"
INDEX = "README.md"
"""In a folder, the page that comes first."""


@dataclass(frozen=True)
class PageKind:
    """One entry of the navigation: `pages` in this order, then what else `folders` have, by name."""

    title: str
    pages: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


KINDS = (
    PageKind("Tutorials", folders=("docs/tutorials",)),
    PageKind(
        "How-to",
        ("docs/operations.md", "docs/upgrading.md", "docs/gangs.md", "docs/security.md", "docs/gpu.md"),
        ("docs/how-to",),
    ),
    PageKind(
        "Reference",
        (
            "docs/reference.md",
            "docs/cli.md",
            "docs/metrics.md",
            "docs/errors.md",
            "docs/alerts.md",
            "docs/dashboards.md",
            "docs/fusion-reference.md",
            "docs/schedules.md",
            "docs/glossary.md",
        ),
        ("docs/reference",),
    ),
    PageKind(
        "Explanation",
        (
            "docs/architecture.md",
            "docs/algorithms.md",
            "docs/fusion.md",
            "docs/fused-training.md",
            "docs/placement.md",
            "docs/speculation.md",
            "docs/engines.md",
            "docs/training.md",
            "docs/weights.md",
            "docs/determinism.md",
            "docs/numerics.md",
            "docs/coordinator.md",
            "docs/code-tour.md",
            "docs/comparison.md",
        ),
        ("docs/explanation",),
    ),
    PageKind("Measurements", folders=("docs/measurements",)),
    PageKind("Runbooks", folders=("docs/runbooks",)),
    PageKind("Decisions", folders=("docs/decisions",)),
    PageKind("Contributing", ("CONTRIBUTING.md", "tests/cluster/README.md")),
)


def navigation(paths: Iterable[str]) -> tuple[tuple[PageKind, tuple[str, ...]], ...]:
    """Each kind with its pages, in order; `paths`: all pages of the documentation but the first one.

    Raises SiteError for pages that no kind has.
    """
    there = sorted(set(paths) - {HOME})
    shown = []
    for kind in KINDS:
        named = [page for page in kind.pages if page in there]
        found = [page for page in there if page.rpartition("/")[0] in kind.folders and page not in named]
        found.sort(key=lambda page: (not page.endswith(f"/{INDEX}"), page))
        shown.append((kind, tuple(named + found)))
    lost = set(there) - {page for _, pages in shown for page in pages}
    if lost:
        known = "KINDS of scripts/docs_site/navigation.py"
        raise SiteError(
            [f"{page}: no kind of the navigation has this page; name it in {known}" for page in sorted(lost)]
        )
    return tuple((kind, pages) for kind, pages in shown if pages)
