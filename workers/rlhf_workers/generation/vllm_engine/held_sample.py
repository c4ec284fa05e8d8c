"""A sample that the engine decodes: its request and every token since.

Rule: every response token has its log-probability and weight version.
"""

import numpy as np

from rlhf_common.samples import FinishReason, ResponsePart, SampleRequest, TokenArray, VersionSpan


class HeldSample:
    """A sample's tokens, extended by drawing."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self._prompt = len(request.prompt)
        self._end = self._prompt + len(request.tokens)
        self._known = np.empty(self._prompt + request.max_response_tokens, np.int32)
        self._known[: self._end] = np.concatenate([request.prompt, request.tokens])
        self._log_probabilities: list[float] = request.log_probabilities.tolist()
        self._spans: list[VersionSpan] = list(request.versions)
        self._sent = len(request.tokens)

    @property
    def length(self) -> int:
        """Return the number of response tokens."""
        return self._end - self._prompt

    @property
    def left(self) -> int:
        """Return how many more tokens the response may have."""
        return len(self._known) - self._end

    @property
    def sequence(self) -> TokenArray:
        """Return prompt and response as a view."""
        return self._known[: self._end]

    @property
    def began(self) -> bool:
        """Return whether a token was drawn since the sample came here."""
        return self.length > len(self.request.tokens)

    def draw(self, token: int, log_probability: float, version: int) -> None:
        """Add the next token."""
        self._known[self._end] = token
        self._end += 1
        self._log_probabilities.append(log_probability)
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = VersionSpan(version, self._spans[-1].tokens + 1)
        else:
            self._spans.append(VersionSpan(version, 1))

    def newest(self, count: int) -> TokenArray:
        """Return the last `count` tokens of the response, or all."""
        return self._known[max(self._prompt, self._end - count) : self._end].copy()

    def unsent(self) -> ResponsePart | None:
        """Return the tokens drawn here that no earlier call returned; None if there are none."""
        if self.length == self._sent:
            return None
        part = self.response(self._sent)
        self._sent = self.length
        return part

    def response(self, offset: int = 0, reason: FinishReason = "") -> ResponsePart:
        """Return the response tokens from `offset` on, copied."""
        return ResponsePart(
            self.request.key,
            offset,
            self._known[self._prompt + offset : self._end].copy(),
            np.array(self._log_probabilities[offset:], np.float32),
            _from(self._spans, offset),
            reason,
        )


def _from(spans: list[VersionSpan], offset: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the tokens from `offset` on."""
    left, remaining = offset, []
    for span in spans:
        if span.tokens > left:
            remaining.append(VersionSpan(span.version, span.tokens - left))
        left = max(0, left - span.tokens)
    return tuple(remaining)
