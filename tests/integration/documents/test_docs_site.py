"""The documentation as a site: it builds strictly, and a bad link fails the build and leaves the earlier site."""

import re
from pathlib import Path

import pytest

from docs_site.build import build

ROOT = Path(__file__).parents[3]


def test_every_page_is_on_the_site_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert build(ROOT, site) == ""
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    shown = [path.with_suffix(".html") if path.name != "README.md" else path.with_name("index.html") for path in pages]
    assert [str(path) for path in shown if not (site / path).is_file()] == []
    assert "source/coordinator/rlhf_coordinator/state/ledger.py.txt" in (site / "code-tour.html").read_text()
    assert "Ledger" in (site / "source/coordinator/rlhf_coordinator/state/ledger.py.txt").read_text()
    assert "pictures/diagrams/architecture-1.svg" in (site / "architecture.html").read_text()
    assert "fusion.html" in (site / "search.js").read_text()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "Content-Security-Policy" in text, page
        assert not re.search(r"<(script|img|iframe|link)[^>]* (src|href)=\"?(https?:)?//", text), page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[lost](docs/lost.md)", "README.md: docs/lost.md is not in the repository"),
        ("[lost](docs/how-to/do.md#so)", "anchor does not exist"),
        ("```mermaid\na\n```", "docs/pictures/diagrams/README-1.svg does not show its diagram"),
    ],
)
def test_a_problem_ends_the_build_and_leaves_the_site_that_was_there(tmp_path: Path, text: str, problem: str) -> None:
    root, there = tmp_path / "repository", tmp_path / "site"
    (root / "docs" / "how-to").mkdir(parents=True)
    (root / "README.md").write_text(f"# Home\n\n{text}\n")
    (root / "docs" / "how-to" / "do.md").write_text("# Do\n")
    there.mkdir()
    (there / "index.html").write_text("earlier")
    assert problem in build(root, there)
    assert (there / "index.html").read_text() == "earlier"
