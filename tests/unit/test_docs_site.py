"""Conversion of the repository's pages to pages of the site."""

import re
from pathlib import Path

import pytest

from docs_site.build import for_site, stage

ROOT = Path(__file__).parents[2]


def shown(text: str, page: str = "docs/tutorials/first.md") -> str:
    return for_site(page, text, set())


@pytest.mark.parametrize(
    ("link", "leads_to"),
    [
        ("[a](second.md#so)", "[a](second.md#so)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[a](../measurements/README.md)", "[a](../measurements/index.md)"),
        ("[a](../../workers/role.py#L3)", "[a](../source/workers/role.py.txt)"),
        ("![a](../pictures/x.png)", "![a](../pictures/x.png)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("`[a](../../workers/role.py)`", "`[a](../../workers/role.py)`"),
        ("[`a`](../../workers/role.py)", "[`a`](../source/workers/role.py.txt)"),
    ],
)
def test_links_lead_to_where_the_site_shows_what_they_name(link: str, leads_to: str) -> None:
    assert shown(f"See {link}.\n") == f"See {leads_to}.\n"


def test_code_stays_as_it_is() -> None:
    text = "```python\nrows[0](../../workers/role.py)\n- x\n```\n"
    assert shown(text) == text


def test_a_list_right_after_a_paragraph_is_a_list() -> None:
    assert shown("Of two kinds:\n- one\n- two\n") == "Of two kinds:\n\n- one\n- two\n"


def test_a_diagram_is_a_picture() -> None:
    text = "# A\n\n```mermaid\nflowchart\n  a --> b\n```\n\nIt ends.\n"
    assert shown(text, "docs/a.md") == "# A\n\n![diagram](pictures/diagrams/a-1.svg){ .diagram }\n\nIt ends.\n"


def test_every_page_has_a_place_and_every_link_and_diagram_its_file(tmp_path: Path) -> None:
    assert stage(ROOT, tmp_path) == []
    named = re.findall(r'"([\w/-]+\.md)"', (tmp_path / "zensical.toml").read_text())
    assert [page for page in named if not (tmp_path / "pages" / page).is_file()] == []
