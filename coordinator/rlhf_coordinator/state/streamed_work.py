"""Gradients that ranks computed before the last token of the iteration in progress; rule: plain data."""

from dataclasses import dataclass


@dataclass
class StreamedWork:
    """The work of rank 0 in commands that ended before the last token, as far as this coordinator process knows."""

    microbatches: int = 0
    seconds: float = 0.0
