"""Compiles the inner loops of this package with numba, and caches the machine code on disk if possible.

Without a writable cache, a process compiles in memory. Without numba the functions run in Python.
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
    """Return `function`, compiled on its first call if numba is installed. The machine code is cached if possible."""
    # Hashes wrap around on purpose. numpy warns about that, numba does not.
    return _compile(function, {}) if njit else np.errstate(over="ignore")(function)


def inlined(function: Function) -> Function:
    """Return a small function, compiled for inlining into compiled loops if numba is installed."""
    return _compile(function, {"forceinline": True}) if njit else function


def _compile(function: Function, options: dict[str, bool]) -> Function:
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # no locator: neither the package folder nor a user cache folder is writable
        return cast(Function, njit(**options)(function))
