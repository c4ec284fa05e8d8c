"""What users' code returned, as numbers and in words.

Rule: standard library only, as children import it. A value is shown without secrets before it is cut, so that no part
of one is left.
"""

import math
import numbers
from typing import Any, Final

from rlhf_workers.user_code.user_host import hide

SHOWN_CHARACTERS: Final = 100


def finite(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any, secrets: list[str]) -> str:
    """Return a value with its type, in words for a person."""
    words = hide(repr(value), secrets)
    return f"{words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + '...'} ({type(value).__name__})"
