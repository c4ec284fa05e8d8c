"""Checks numbers of JSON documents.

Rule: a whole number of JSON may have any size, and a float may be NaN or infinite. None of them raises here.
"""

import math


def finite_number(value: object) -> float | None:
    """Return a finite number as a float; None for any other value, for a bool, and for a number that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
