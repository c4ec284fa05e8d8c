"""Drafts from the sample's own text: the continuation of the latest earlier occurrence of its last tokens.

Rule: the longest repeated suffix counts, up to LONGEST_MATCH tokens. The drafter has no state.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import MATCHES, Draft, DraftRequest

LONGEST_MATCH: Final = MATCHES - 1
"""Maximum tokens of a match."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)


class NgramDrafter:
    """The drafter `Ngram`."""

    name = "Ngram"

    def begin(self, request: SampleRequest) -> None:
        """Do nothing."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Do nothing."""

    def end(self, key: SampleKey) -> None:
        """Do nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the continuation of each text's longest repeated suffix; `match`: its length, up to LONGEST_MATCH."""
        return [_continuation(request.tokens, request.longest) for request in requests]


def build_drafter(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> NgramDrafter:
    """Return the drafter; it needs nothing from the job."""
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
