"""How much of a step's time was prefill, where one pass of vLLM prefills some samples and decodes others.

Rule: a step without prefill says what decoding costs now; what a mixed step took beyond that was prefill. Before there
was such a step, tokens share the time alike. Never zero where something was prefilled: costs are learned from it.
"""


class StepTimes:
    """Of one engine; forget nothing but by newer steps."""

    def __init__(self) -> None:
        self._decode_ns: int | None = None
        """Of the newest step that only decoded."""

    def prefill_ns(self, step_ns: int, prefilled: int, rows: int) -> int:
        """Return the part of a step that took `step_ns`, ran `prefilled` tokens and decoded one of each of `rows`."""
        if not prefilled:
            if rows:
                self._decode_ns = step_ns
            return 0
        if not rows:
            return step_ns
        share = step_ns * prefilled // (prefilled + rows)
        return max(1, share if self._decode_ns is None else step_ns - min(step_ns - 1, self._decode_ns))
