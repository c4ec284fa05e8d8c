"""A sender of spans for tests that keeps what it is given."""

from collections.abc import Sequence

from rlhf_common.tracing.span import TraceSpan


class KeptSpans:
    """Takes every span."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        """Keep them."""
        self.spans += spans
        return True

    def stop(self) -> None:
        """There is nothing to stop."""
