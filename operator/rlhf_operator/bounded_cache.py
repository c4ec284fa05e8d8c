"""Caches results of pure functions of long texts within a limit of entries and of characters."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

CHARACTERS: Final = 8_000_000
"""Most characters of the arguments of the calls in the cache of one function: two thousand jobs of 4,000."""
LONGEST: Final = CHARACTERS // 16
"""Most characters of the arguments of one cached call. A call with longer ones is computed each time, rather than evict
the others.
"""


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
    """Return a decorator that caches the latest results: at most `most`, with arguments of at most CHARACTERS
    characters.
    """
    return lambda function: BoundedCache(function, most)


def _weight(value: Any) -> int:
    """Return the length of a text or of bytes, or of those in a tuple, a frozenset or an object's `__dict__`."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, tuple | frozenset):
        return sum(map(_weight, value))
    return sum(map(_weight, vars(value).values())) if hasattr(value, "__dict__") else 0
