"""Decides where a response ends: at a stop token, a stop string that its newest token completes, or its limit.

Rule: a table over the vocabulary shows which tokens may complete a stop string. Must never decode more than a window of
newest tokens.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_common.model_files.model_limits import end_ids
from rlhf_common.samples import NOT_SAMPLED, FinishReason, SampleRequest, TokenArray
from rlhf_workers.generation.engine import SamplingParameters

WINDOW_MARGIN: Final = 16
"""Tokens in the window beyond one per character of the longest stop string: some tokens decode to nothing."""
UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is part of a multi-byte character."""


class StopRule:
    """Stop tokens and stop strings of one job."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: Sequence[int], strings: Sequence[str]) -> None:
        """`tokenizer` decodes ids; `vocabulary` is the width of the logits."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self.is_stop: npt.NDArray[np.bool_] = np.zeros(vocabulary, bool)
        """Tokens that end a response by themselves, [vocabulary]."""
        self.is_stop[[token for token in stop_ids if 0 <= token < vocabulary]] = True
        self.may_complete: npt.NDArray[np.bool_] = self._completing(vocabulary)
        """Tokens whose text may contain the last character of a stop string, or part of one, [vocabulary]."""
        self.window = max((len(string) for string in strings), default=0) + WINDOW_MARGIN
        """Number of newest response tokens that `ends_with_string` looks at."""

    @property
    def has_strings(self) -> bool:
        """Whether the job has stop strings."""
        return bool(self._strings)

    def ends_with_string(self, tokens: TokenArray) -> bool:
        """Return whether the text of the window, including special tokens, contains a stop string."""
        text = self._tokenizer.decode(tokens[-self.window :].tolist(), skip_special_tokens=False)
        return any(string in text for string in self._strings)

    def complete_reason(self, request: SampleRequest) -> FinishReason:
        """Return why a resumed sample needs no further token; empty if it needs one."""
        if not len(request.tokens):
            return ""
        if request.log_probabilities[-1] == NOT_SAMPLED:  # the environment's tokens do not end the policy's next turn
            return "length" if len(request.tokens) >= request.max_response_tokens else ""
        if self.is_stop[request.tokens[-1]]:
            return "stop"
        if self.has_strings and self.ends_with_string(request.tokens):
            return "stop"
        return "length" if len(request.tokens) >= request.max_response_tokens else ""

    def _completing(self, vocabulary: int) -> npt.NDArray[np.bool_]:
        table = np.zeros(vocabulary, bool)
        if not self._strings:
            return table
        last = {string[-1] for string in self._strings} | {UNFINISHED}
        size = min(vocabulary, len(self._tokenizer))
        texts = self._tokenizer.batch_decode([[token] for token in range(size)], skip_special_tokens=False)
        # SentencePiece drops a leading space when a token is decoded alone.
        table[:size] = [not last.isdisjoint(text) or (" " in last and text[:1] != " ") for text in texts]
        return table


def stop_ids(model: Any, tokenizer: Any, parameters: SamplingParameters) -> list[int]:
    """Return the stop tokens of the job, the tokenizer and the model's generation defaults."""
    own = getattr(model.generation_config, "eos_token_id", None)
    return end_ids(parameters.stop_token_ids, tokenizer.eos_token_id, own)
