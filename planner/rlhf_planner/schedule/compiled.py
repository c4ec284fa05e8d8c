"""How the inner loops of this package are compiled: numba, cached on disk where a disk is there to write.

A function compiled here is pure: arrays in, numbers out. On a read-only file system numba refuses to decorate with a
cache, so this falls back to compiling in memory, once a process (about ten seconds for the whole package). Where numba
is not installed the functions run as they are written: the same numbers, so much slower that a search within a time
limit looks at fewer schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

try:
    from numba import njit
except ModuleNotFoundError:
    njit = None

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return `function`, compiled on its first call; the machine code is kept beside the module where that can be
    written."""
    # Hashes wrap around on purpose, of which numpy warns where numba does not.
    return _compile(function, {}) if njit else np.errstate(over="ignore")(function)


def inlined(function: Function) -> Function:
    """Return the same for a small function that compiled loops call: a call costs more than its body, for all its
    arrays."""
    return _compile(function, {"forceinline": True}) if njit else function


def _compile(function: Function, options: dict[str, bool]) -> Function:
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # no locator: neither the package folder nor a user cache folder can be written
        return cast(Function, njit(**options)(function))
