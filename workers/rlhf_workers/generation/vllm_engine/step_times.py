"""Estimates the prefill share of a step's time, because one pass of vLLM may prefill some samples and decode others.

Rule: a step without prefill gives the cost of decoding; additional time of a mixed step is prefill. Before the first
such step, tokens share the time equally.
"""


class StepTimes:
    """Step times of one engine."""

    def __init__(self) -> None:
        self._decode_ns: int | None = None
        """Nanoseconds of the latest step that only decoded."""

    def prefill_ns(self, step_ns: int, prefilled: int, rows: int) -> int:
        """Return the nanoseconds of prefill in a step of `step_ns` with `prefilled` tokens and `rows` decoded ones."""
        if not prefilled:
            if rows:
                self._decode_ns = step_ns
            return 0
        if not rows:
            return step_ns
        share = step_ns * prefilled // (prefilled + rows)
        return max(1, share if self._decode_ns is None else step_ns - min(step_ns - 1, self._decode_ns))
