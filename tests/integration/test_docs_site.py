"""The documentation as a site: it builds strictly, all of it leads somewhere, and nothing comes from another host."""

import subprocess
from pathlib import Path

import pytest

from docs_site.build import Built, build
from docs_site.problems import SiteError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built]:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    return folder, build(ROOT, folder)


def test_every_page_of_the_repository_is_a_page_of_the_site(site: tuple[Path, Built]) -> None:
    folder, built = site
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    shown = [path.with_suffix(".html") if path.name != "README.md" else path.with_name("index.html") for path in pages]
    assert [str(path) for path in shown if not (folder / path).is_file()] == []
    assert built.pages > len(pages)
    assert (folder / "index.html").is_file()


def test_a_link_to_code_leads_to_a_page_with_that_code(site: tuple[Path, Built]) -> None:
    folder, _ = site
    tour = (folder / "code-tour.html").read_text()
    assert "source/coordinator/rlhf_coordinator/state/ledger.py.html" in tour
    shown = (folder / "source/coordinator/rlhf_coordinator/state/ledger.py.html").read_text()
    assert "Ledger" in shown


def test_pictures_and_the_index_of_the_search_are_part_of_the_site(site: tuple[Path, Built]) -> None:
    folder, _ = site
    assert (folder / "pictures" / "quickstart-reward.png").stat().st_size > 0
    assert "pictures/diagrams/architecture-1.svg" in (folder / "architecture.html").read_text()
    index = (folder / "search.js").read_text()
    assert "fusion.html" in index
    assert "source/" not in index, "source files are not what a reader searches"


def test_a_browser_is_told_to_load_nothing_from_elsewhere(site: tuple[Path, Built]) -> None:
    folder, _ = site
    for page in folder.rglob("*.html"):
        assert "Content-Security-Policy" in page.read_text(), page


def test_a_page_with_a_dead_link_ends_the_build_and_leaves_the_site_that_was_there(tmp_path: Path) -> None:
    root, there = tmp_path / "repository", tmp_path / "site"
    (root / "docs" / "how-to").mkdir(parents=True)
    (root / "README.md").write_text("# Home\n\n[lost](docs/lost.md)\n")
    (root / "docs" / "how-to" / "do.md").write_text("# Do\n")
    there.mkdir()
    (there / "index.html").write_text("earlier")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    with pytest.raises(
        SiteError, match=r"README\.md:3: docs/lost\.md leads to docs/lost\.md, which the repository has not"
    ):
        build(root, there)
    assert (there / "index.html").read_text() == "earlier"
    (root / "README.md").write_text("# Home\n\n[do it](docs/how-to/do.md#so)\n")
    with pytest.raises(SiteError, match="so"):
        build(root, there)
    (root / "README.md").write_text("# Home\n\n[do it](docs/how-to/do.md)\n")
    build(root, there)
    assert "do.html" in (there / "index.html").read_text()
