"""New weights for the draft model by which vLLM itself drafts, beside the policy's.

Rule: checked whole before any is replaced, by transformers' model of its folder, and put in place as the policy's are:
what vLLM's own `start_draft_weight_update` would select is reloaded layer by layer. Half-done it drafts worse and
changes no token, but is told as the policy's is. Without training it keeps the weights of its folder.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.vllm_engine.expected_weights import ExpectedWeights
from rlhf_workers.generation.vllm_engine.weight_pieces import Named


class DraftingCore(Protocol):
    """What is asked of vLLM's core."""

    def replace_draft_weights(self, named: Iterable[Named]) -> None: ...


class VllmDraftModel:
    """Of one engine."""

    def __init__(self, core: DraftingCore, weights: ExpectedWeights) -> None:
        """`weights` are those of the draft model's folder."""
        self._core = core
        self._weights = weights

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace all weights; return bytes. WorkError WeightsMismatch while nothing has changed, or WeightsTorn."""
        checked = self._weights.check(tensors, what="the draft model")
        try:
            self._core.replace_draft_weights(checked.named)
        except Exception as error:
            message = f"the draft model was put in place half-way only: {describe(error)}"
            raise WorkError("WeightsTorn", message, retryable=True) from error
        return checked.bytes
