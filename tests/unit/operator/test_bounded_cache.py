"""A bounded cache is limited by size, and returns the function's results."""

import json
import tracemalloc
from dataclasses import dataclass

import pytest
from tests.support.operator.simulated_cluster import stored_job

from rlhf_operator import bounded_cache
from rlhf_operator.bounded_cache import cached
from rlhf_operator.reconcile.parsed_job import parse_job

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class TextRecord:
    text: str
    data: bytes = b""


def test_what_was_asked_is_remembered_until_others_take_its_place() -> None:
    asked = []

    @cached(2)
    def length(text: str) -> int:
        asked.append(text)
        return len(text)

    assert [length(item) for item in ("a", "bb", "a", "ccc", "bb")] == [1, 2, 1, 3, 2]
    assert asked == ["a", "bb", "ccc", "bb"]


def test_long_texts_are_worked_on_again_and_many_short_ones_stay_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_cache, "CHARACTERS", 160)
    monkeypatch.setattr(bounded_cache, "LONGEST", 10)
    asked = []

    @cached(1000)
    def characters(texts: TextRecord, more: tuple[str, ...] = ()) -> int:
        asked.append(texts)
        return 0

    for _ in range(2):
        characters(TextRecord("x" * 6, b"y" * 6))
    assert len(asked) == 2, "longer than any that is kept"
    for number in range(40):
        characters(TextRecord(f"{number:08}"))
    characters(TextRecord(f"{39:08}"))
    assert len(asked) == 42
    characters(TextRecord(f"{0:08}"))
    assert len(asked) == 43, "driven out by the size of what came after"


@pytest.mark.full
def test_a_large_manifest_that_is_edited_again_and_again_does_not_fill_memory() -> None:
    def edited(number: int) -> dict[str, object]:
        note = {"note": f"{number} " + "x" * 300_000}
        return stored_job(generation={"replicas": 2, "template": {"metadata": {"annotations": note}}})

    parse_job(edited(0))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(80):
        parse_job(json.loads(json.dumps(edited(number))))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 45 * MEGABYTE, f"{grown // MEGABYTE} MB"
