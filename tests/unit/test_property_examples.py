"""Property tests see the same examples for any imports, so the change that causes a failure also finds it."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = range(7_000_000_000, 7_000_000_500)
"""Numbers in the code of the module below, and nowhere else."""


def examples() -> list[tuple[list[int], float, str]]:
    """Return the examples of a property test."""
    seen: list[tuple[list[int], float, str]] = []

    @settings(max_examples=200)
    @given(st.lists(st.integers(), max_size=20), st.floats(allow_nan=False), st.text())
    def collect(numbers: list[int], number: float, text: str) -> None:
        seen.append((numbers, number, text))

    collect()
    return seen


def test_examples_do_not_depend_on_what_else_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get_current_profile_name() != "same-everywhere":
        pytest.skip("who explores wants other examples")
    before = examples()
    (tmp_path / "module_of_numbers.py").write_text(f"FOUND = {list(NUMBERS)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_numbers", raising=False)
    assert importlib.import_module("module_of_numbers").FOUND
    assert examples() == before
    assert not {number for numbers, *_ in before for number in numbers} & set(NUMBERS)
