"""Malformed bodies: real ones in which some values have another type, form or size."""

import copy
import functools
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]


def nested(levels: int) -> Any:
    """Return objects nested in each other."""
    result: Any = 1
    for _ in range(levels):
        result = {"a": result}
    return result


def many(value: Any) -> list[Any]:
    """Return a long list of separate objects, as in JSON. If the entries were one object, a few changes would change
    all of them and produce more than any server stores.
    """
    return [copy.deepcopy(value) for _ in range(300)]


GONE = object()
"""Marks a value to remove."""
VALUES: list[Any] = [
    GONE,
    None,
    "",
    "abc",
    "²",
    "-1",
    "9" * 5000,
    "x" * 5000,
    "\ud83d",
    "\x00\u2028",
    "2026-08-22T10:00:00",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "2026-08-22T10:00:00Z",
    "True",
    "Failed",
    "coordinator",
    "job-uid",
    True,
    False,
    0,
    -1,
    7,
    2**31,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    1e300,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": None},
    {"type": 3},
    {"": ""},
    {"worker": {}},
    functools.partial(many, "x"),
    functools.partial(many, {"type": "Ready"}),
    functools.partial(nested, 70),
    functools.partial(nested, 3000),
]
"""Replacement values; a function creates one that must not be shared."""
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(range(len(VALUES)))), min_size=1, max_size=4)
"""(place, number of the value) of each change."""


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (object or list, key) of every place in a body."""
    result: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, below in inner:
            result.append((item, key))
            waiting.append(below)
    return result


def changed(body: Json, changes: list[tuple[int, int]]) -> Json:
    """Return the body with replaced values."""
    result = copy.deepcopy(body)
    for place, number in changes:
        every = places(result)
        if not every:
            break
        holder, key = every[place % len(every)]
        value = VALUES[number]
        if value is GONE:
            del holder[key]
        else:
            holder[key] = value() if callable(value) else copy.deepcopy(value)
    return result
