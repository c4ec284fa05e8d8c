"""Caches results of pure functions of long texts within a limit of entries and of characters.

Rule: the number of entries alone is not a bound. A manifest may have a million characters, and its author may edit it
every second; a thousand of those would fill the operator's memory.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

CHARACTERS: Final = 8_000_000
"""Characters of all texts in the cache of one function: two thousand jobs of 4,000. A result can take ten times the
size of its text.
"""
LONGEST: Final = CHARACTERS // 16
"""Characters of the longest text that is cached. A longer one is computed each time, rather than evict the others."""


class BoundedCache(Generic[Given, Result]):
    """A function with its latest results."""

    def __init__(self, function: Callable[Given, Result], most: int) -> None:
        self._function, self._most = function, most
        self._kept: OrderedDict[Hashable, tuple[int, Result]] = OrderedDict()
        self._held = 0
        update_wrapper(self, function)

    def __call__(self, *arguments: Given.args, **named: Given.kwargs) -> Result:
        """Return the function's result. Positional arguments are the key. Arguments by name are not part of it."""
        if arguments in self._kept:
            self._kept.move_to_end(arguments)
            return self._kept[arguments][1]
        result, weight = self._function(*arguments, **named), sum(map(_weight, arguments))
        if weight <= LONGEST:
            self._kept[arguments] = weight, result
            self._held += weight
        while len(self._kept) > self._most or self._held > CHARACTERS:
            self._held -= self._kept.popitem(last=False)[1][0]
        return result

    def cache_clear(self) -> None:
        """Remove all results."""
        self._kept.clear()
        self._held = 0


def cached(most: int) -> Callable[[Callable[Given, Result]], BoundedCache[Given, Result]]:
    """Return a decorator like functools.lru_cache, for at most `most` results and CHARACTERS characters."""
    return lambda function: BoundedCache(function, most)


def _weight(value: Any) -> int:
    """Return the number of characters in a text, or in the texts of a tuple, a set or a record."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, tuple | frozenset):
        return sum(map(_weight, value))
    return sum(map(_weight, vars(value).values())) if hasattr(value, "__dict__") else 0
