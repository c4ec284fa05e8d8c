"""`rlhf view`: rejected inputs, and the page as a file."""

import json
import re
from pathlib import Path

import pytest
from tests.support.jobs.recorded_run import write_run

from rlhf_cli.local.errors import RunError
from rlhf_cli.view import view_run


def test_the_page_is_written_with_its_data_beside_it_and_again_over_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for _ in range(2):
        assert view_run(tmp_path / "run", port=None, browser=False, target=tmp_path / "page") == 0
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["index.html", "run.json"]
    deltas = json.loads((tmp_path / "page" / "run.json").read_text())
    assert {iteration["iteration"] for delta in deltas for iteration in delta["iterations"]} == {0, 1, 2}
    assert str(tmp_path) not in (tmp_path / "page" / "index.html").read_text(), "a page that is sent names no paths"


@pytest.mark.parametrize(
    ("port", "target", "words"),
    [
        (80000, None, "--port 80000: must be 1 to 65535"),
        (0, None, "--port 0: must be 1 to 65535"),
        (8000, "new", "--port 8000: nothing is served with --output"),
        (None, "run", "--output {folder}/run: holds "),
        (None, "run/job.json", "--output {folder}/run/job.json: is a file"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(
    tmp_path: Path, port: int | None, target: str | None, words: str
) -> None:
    write_run(tmp_path / "run", iterations=1)
    with pytest.raises(RunError, match=re.escape(words.format(folder=tmp_path))):
        view_run(tmp_path / "run", port=port, browser=False, target=None if target is None else tmp_path / target)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"RUN {re.escape(str(tmp_path))}: there is no run in it"):
        view_run(tmp_path, port=None, browser=False, target=None)
