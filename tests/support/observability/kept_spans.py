"""A sender of spans for tests that stores them."""

from collections.abc import Sequence

from rlhf_common.tracing.span import TraceSpan


class KeptSpans:
    """Accepts every span."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        """Store them."""
        self.spans += spans
        return True

    def stop(self) -> None:
        """Do nothing."""
