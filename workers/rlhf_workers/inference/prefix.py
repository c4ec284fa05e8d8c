"""What is already scored of one sample under one model: its first tokens, their keys and values, their numbers.

Rule: it is of exactly the tokens it was computed from. `agrees` compares them one by one, so a prefix of a sample that
went on with other tokens is found out and dropped, never continued.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rlhf_workers.inference.chunk_forward import Computed
from rlhf_workers.inference.samples import Tokens


@dataclass
class Prefix(Computed):
    """Grows with every chunk."""

    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and response as far as they went into the numbers: one more than `positions`, or none."""
    prompt: int = 0
    """Tokens of them that are the prompt's."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """Of the response's tokens so far, in order."""

    def agrees(self, prompt: int, tokens: Tokens) -> bool:
        """Whether a sample with this prompt length and these tokens [n] begins as this one did."""
        mine = len(self.tokens)
        begun = mine > 0
        return not begun or (
            self.prompt == prompt and mine <= len(tokens) and np.array_equal(self.tokens, tokens[:mine])
        )
