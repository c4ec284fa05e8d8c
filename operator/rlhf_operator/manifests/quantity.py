"""Converts Kubernetes quantities (500m, 1Gi, 2, 1e3) to numbers, and numbers to quantities. Pure."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_BINARY: Final = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL: Final = {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)}
_SMALL: Final = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_SUFFIXES: Final[Mapping[str, Decimal]] = {**_BINARY, **_DECIMAL, **_SMALL}


def amount(text: object) -> Decimal:
    """Return a Kubernetes quantity (500m, 1Gi, 2, 1e3) as a number. Raises ValueError."""
    quantity = str(text).strip()
    suffix = next((ending for ending in _SUFFIXES if quantity.endswith(ending)), "")
    try:
        return Decimal(quantity.removesuffix(suffix)) * _SUFFIXES.get(suffix, Decimal(1))
    except ArithmeticError as error:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m, 2 or 1Gi") from error


def written(value: Decimal) -> str:
    """Return the number as a quantity, rounded up to thousandths."""
    return str(int(value)) if value == int(value) else f"{math.ceil(value * 1000)}m"
