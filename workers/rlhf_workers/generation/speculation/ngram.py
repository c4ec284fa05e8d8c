"""Drafts from the sample's own text: what followed the last time that its latest tokens stood there.

Rule: the longest repeated end of the text counts, at most LONGEST_MATCH tokens of it; among its places the latest.
Where the text ends before the guess is long enough, it is taken to go on as it did from there: what repeats, repeats.
It keeps nothing: the text comes with every request, so there is nothing to bound, to age or to forget.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import MATCHES, Draft, DraftRequest

LONGEST_MATCH: Final = MATCHES - 1
"""Tokens; a longer match is no better a guess."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)


class NgramDrafter:
    """The drafter `Ngram`."""

    name = "Ngram"

    def begin(self, request: SampleRequest) -> None:
        """Has nothing to take note of."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Has nothing to take note of."""

    def end(self, key: SampleKey) -> None:
        """Has nothing to take note of."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return what followed each text's longest repeated end; `match` is the number of its tokens."""
        return [_continuation(request.tokens, request.longest) for request in requests]


def build_drafter(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> NgramDrafter:
    """Return the drafter; it takes nothing from the job."""
    return NgramDrafter()


def _continuation(text: TokenArray, longest: int) -> Draft:
    if longest < 1 or len(text) < 2:
        return NOTHING
    places = np.flatnonzero(text[:-1] == text[-1])
    if not places.size:
        return NOTHING
    match = 1
    while match < LONGEST_MATCH:
        nearer = places[places >= match]
        nearer = nearer[text[nearer - match] == text[-1 - match]]
        if not nearer.size:
            break
        places = nearer
        match += 1
    start = int(places[-1]) + 1
    return Draft(
        np.resize(text[start:], longest) if len(text) - start < longest else text[start : start + longest].copy(), match
    )
