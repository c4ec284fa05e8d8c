"""What a page of the repository becomes on the site, and what the site refuses."""

from pathlib import Path

import pytest

from docs_site.built_pages import problems_of
from docs_site.navigation import navigation
from docs_site.pages import blocks_of, page_for_site
from docs_site.problems import SiteError
from docs_site.source_pages import file_page, folder_page


def shown(text: str, page: str = "docs/tutorials/first.md") -> str:
    return page_for_site(page, text, {"workers"}.__contains__)


@pytest.mark.parametrize(
    ("link", "leads_to"),
    [
        ("[a](second.md#so)", "[a](second.md#so)"),
        ("[a](../fusion.md)", "[a](../fusion.md)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[a](../measurements/README.md)", "[a](../measurements/index.md)"),
        ("[a](../../workers/role.py)", "[a](../source/workers/role.py.md)"),
        ("[a](../../workers)", "[a](../source/workers/index.md)"),
        ("![a](../pictures/x.png)", "![a](../pictures/x.png)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("`[a](../../workers/role.py)`", "`[a](../../workers/role.py)`"),
        ("[`a`](../../workers/role.py)", "[`a`](../source/workers/role.py.md)"),
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


def test_blocks_are_what_stands_between_fences_without_their_indentation() -> None:
    (first, second) = blocks_of("  ```sh\n  rlhf get\n  ```\n\n````\n```\n````\n")
    assert (first.line, first.language, first.text) == (1, "sh", "rlhf get\n")
    assert second.text == "```\n"


def test_pages_of_a_folder_are_of_its_kind_and_any_other_page_must_be_named() -> None:
    kinds = {kind.title: pages for kind, pages in navigation(["docs/how-to/b.md", "docs/how-to/a.md", "docs/cli.md"])}
    assert kinds == {"How-to": ("docs/how-to/a.md", "docs/how-to/b.md"), "Reference": ("docs/cli.md",)}
    with pytest.raises(SiteError, match=r"docs/new\.md: no kind of the navigation has this page; name it in KINDS"):
        navigation(["docs/new.md"])


def test_a_source_file_is_shown_whole_and_a_folder_says_what_its_files_own() -> None:
    assert "````python\nx = '''\n```\n'''\n````" in file_page("a.py", "x = '''\n```\n'''\n")
    page = folder_page("w", {"w/a.py": '"""Owns a_b."""\n', "w/x.bin": ""}, ["inner"], frozenset({"w/a.py"}))
    assert page.splitlines()[-3:] == ["- `inner/`", "- [`a.py`](a.py.md): Owns a\\_b.", "- `x.bin`"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="b.html#x">b</a>', "b.html has no anchor x"),
        ('<a href="c.html">c</a>', "c.html, which the site has not"),
        ('<img src="https://example.com/x.png">', "loads https://example.com/x.png from another host"),
        ('<script src="//example.com/x.js"></script>', "loads //example.com/x.js from another host"),
        (
            '<link rel="stylesheet" href="https://example.com/x.css">',
            "loads https://example.com/x.css from another host",
        ),
        ('<div class="mermaid">a</div>', "a diagram would be drawn by a library from another host"),
        ('<a href="/b.html">b</a>', "is a path of the host"),
    ],
)
def test_what_a_browser_would_stumble_over_is_named(tmp_path: Path, body: str, problem: str) -> None:
    (tmp_path / "a.html").write_text(f"<p>\n{body}</p>")
    (tmp_path / "b.html").write_text('<h1 id="y">b</h1>')
    (found,) = problems_of(tmp_path)
    assert found.startswith("a.html:2: ")
    assert problem in found


def test_links_to_other_hosts_are_no_loads(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.com">x</a><a href="b.html#y">b</a><a href="#z" id="z">z</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="y">b</h1>')
    assert problems_of(tmp_path) == []


def test_a_style_that_imports_from_another_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import url('https://fonts.example.com/x');")
    assert problems_of(tmp_path) == ["a.css: loads https://fonts.example.com/x from another host"]
