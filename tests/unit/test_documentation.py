"""The documentation is consistent: its links have targets, and its pictures show the states in the code."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

from rlhf_common.conditions import RunningReason
from rlhf_common.names import ExitCode
from rlhf_coordinator.state.sample import SampleState

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def pages() -> tuple[Path, ...]:
    """Return every page in the repository."""
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
    """Return the anchors of a page's headings on the web."""
    slugs = set()
    for heading in HEADING.findall(without_code(page.read_text())):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slugs.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return slugs


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


def pictures() -> list[str]:
    """Return the text of the pictures of docs/architecture.md, in order."""
    return re.findall(r"^```mermaid\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE | re.DOTALL)


def states_of(picture: str) -> set[str]:
    pairs = re.findall(r"^ *(\S+) --> (\S+)", picture, re.MULTILINE)
    return {state for pair in pairs for state in pair} - {"[*]"}


def test_the_life_of_a_sample_has_the_states_of_the_ledger() -> None:
    assert states_of(pictures()[1]) == {state.value for state in SampleState}


def test_the_life_of_a_job_has_the_reasons_that_users_are_shown() -> None:
    assert states_of(pictures()[2]) == {reason.value for reason in RunningReason} - {"NameTaken"}


def test_the_page_of_errors_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(code.value, code.name) for code in ExitCode]


def test_the_packages_are_those_whose_imports_are_checked() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    assert set(re.findall(r"rlhf_\w+", pictures()[4])) == set(checked)


def test_the_table_of_the_coordinator_has_its_packages() -> None:
    table = (ROOT / "docs" / "coordinator.md").read_text().partition("| package | files |")[2].partition("\n\n")[0]
    packages = {path.parent.name for path in (ROOT / "coordinator" / "rlhf_coordinator").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)) == packages
