"""The two tiers of tests: `make test` runs the quick tier, `make test-all` runs every test.

A test with the marker `full` belongs to the full tier alone. With `full(quick=n)`, the first n cases of a parametrized
test belong to the quick tier too. This module only moves the marker; `-m "not full"` selects the quick tier.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

MARKER = "full"


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
