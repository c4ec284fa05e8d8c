"""The two tiers of tests: `make test` runs the quick tier, `make test-all` runs every test.

A test with the marker `full` belongs to the full tier alone. With `full(quick=n)`, the first n cases of a parametrized
test belong to the quick tier too. A property test tries a quarter of its examples in the quick tier. This module only
moves the marker and lowers the number of examples; `-m "not full"` selects the quick tier.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

MARKER = "full"
QUICK_TIER = f"not {MARKER}"
"""The expression of `-m` that selects the quick tier."""
FEWEST_EXAMPLES = 10
"""Number of examples up to which a property test tries all of them in either tier."""
SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a property test with its settings; Hypothesis has no public one."""


def unmark_quick_cases(items: Iterable[pytest.Item]) -> None:
    """Remove the marker from the first `quick` cases of each test, in the order of collection."""
    cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if cases[test] <= marker.kwargs.get("quick", 0):
            item.own_markers = [mark for mark in item.own_markers if mark.name != MARKER]


def try_fewer_examples(items: Iterable[pytest.Item]) -> None:
    """Lower the number of examples of each property test to that of the quick tier."""
    for owner, name in {place for item in items if (place := _place_of_settings(item)) is not None}:
        before: settings = getattr(owner, name)
        setattr(owner, name, settings(before, max_examples=quick_examples(before.max_examples)))


def _place_of_settings(item: pytest.Item) -> tuple[Any, str] | None:
    """Return the function or the state machine of a property test and its attribute, or None for another test."""
    test, machine = getattr(item, "obj", None), getattr(item, "cls", None)
    test = getattr(test, "__func__", test)
    for owner, name in ((test, SETTINGS), (machine, "settings")):
        if isinstance(getattr(owner, name, None), settings):
            return owner, name
    return None


def quick_examples(in_full_tier: int) -> int:
    """Return the number of examples in the quick tier."""
    return min(in_full_tier, max(FEWEST_EXAMPLES, in_full_tier // 4))
