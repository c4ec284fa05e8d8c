"""Updates the weights of vLLM's draft model together with the policy.

Rule: the complete set is checked before any weight is replaced.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.vllm_engine.expected_weights import ExpectedWeights
from rlhf_workers.generation.vllm_engine.weight_pieces import Named


class DraftingCore(Protocol):
    """The methods of vLLM's core used here."""

    def replace_draft_weights(self, named: Iterable[Named]) -> None: ...


class VllmDraftModel:
    """vLLM's draft model in one engine."""

    def __init__(self, core: DraftingCore, weights: ExpectedWeights) -> None:
        """`weights` describes the draft model's folder."""
        self._core = core
        self._weights = weights

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace all weights; return bytes. Raises WorkError WeightsMismatch if nothing changed, else WeightsTorn."""
        checked = self._weights.check(tensors, subject="the draft model")
        try:
            self._core.replace_draft_weights(checked.named)
        except Exception as error:
            message = f"the draft model was only partly replaced: {describe(error)}"
            raise WorkError("WeightsTorn", message, retryable=True) from error
        return checked.bytes
