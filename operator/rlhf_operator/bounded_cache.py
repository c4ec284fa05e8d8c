"""Results of pure functions of long texts, remembered within bounds that no text can break.

Rule: bounded by what is kept, not only by how many: a manifest may have a million characters, whoever writes one may
edit it every second, and a thousand of those would be all of the operator's memory. Owns no clock and no object.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

CHARACTERS: Final = 8_000_000
"""Characters of all texts that one function remembers: those of two thousand jobs of 4,000; what is made of a text
takes up to ten times its size."""
LONGEST: Final = CHARACTERS // 16
"""Of one result; a longer text is worked on again each time, at some milliseconds, rather than drive the others out."""


class BoundedCache(Generic[Given, Result]):
    """A function with its last results."""

    def __init__(self, function: Callable[Given, Result], most: int) -> None:
        self._function, self._most = function, most
        self._kept: OrderedDict[Hashable, tuple[int, Result]] = OrderedDict()
        self._held = 0
        update_wrapper(self, function)

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Result:
        """Return the function's result. Only positional arguments are remembered by; they are texts or hold texts."""
        if given in self._kept:
            self._kept.move_to_end(given)
            return self._kept[given][1]
        result, weight = self._function(*given, **named), sum(map(_weight, given))
        if weight <= LONGEST:
            self._kept[given] = weight, result
            self._held += weight
        while len(self._kept) > self._most or self._held > CHARACTERS:
            self._held -= self._kept.popitem(last=False)[1][0]
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        self._kept.clear()
        self._held = 0


def cached(most: int) -> Callable[[Callable[Given, Result]], BoundedCache[Given, Result]]:
    """Return a decorator as functools.lru_cache is one, for `most` results, and for no more text than CHARACTERS."""
    return lambda function: BoundedCache(function, most)


def _weight(value: Any) -> int:
    """Return the characters of a text, or of those that a record is made of."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, tuple | frozenset):
        return sum(map(_weight, value))
    return sum(map(_weight, vars(value).values())) if hasattr(value, "__dict__") else 0
