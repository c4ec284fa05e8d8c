"""Checks and describes values that users' code returned.

Rule: it imports no library beyond the standard one, as child processes import this module. Secrets are hidden before a
text is cut.
"""

import math
import numbers
from typing import Any, Final

from rlhf_workers.user_code.user_host import hide

SHOWN_CHARACTERS: Final = 100


def finite(value: Any) -> float | None:
    """Return a finite real number as a float; None for anything else."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any, secrets: list[str]) -> str:
    """Return a value with its type, as text for people."""
    words = hide(repr(value), secrets)
    return f"{words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + '...'} ({type(value).__name__})"
