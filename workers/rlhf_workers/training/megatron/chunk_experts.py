"""Megatron's layers of experts in a chunk: router, dispatch and experts.

Owns the Megatron options that make such a layer equal to the family's own: no token is dropped, and no term is added to
the loss.

Rule: the experts of a layer are two tensors, as in transformers.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

with warnings.catch_warnings():  # as in chunk_modules, whichever is imported first
    warnings.simplefilter("ignore")
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router import TopKRouter

from rlhf_planner.tensor_split import expert_count
from rlhf_workers.models.experts import Spread, TellCounts


class PlainRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with a family's weights and choice of experts."""

    def __init__(self, normalised: bool, **options: Any) -> None:
        """`normalised`: whether the weights of a token's experts sum to 1."""
        super().__init__(**options)
        self._normalised = normalised

    def forward(self, hidden: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for [s, b, hidden], in rows, the weight [n, experts] of every expert, 0 if it was not chosen, and the
        mask of chosen experts. Weights are float32.
        """
        logits = functional.linear(hidden, self.weight).flatten(0, -2).float()
        weights, chosen = topk_routing_with_score_function(logits, self.topk, use_pre_softmax=True)
        return weights / weights.sum(dim=-1, keepdim=True) if self._normalised else weights, chosen


class PackedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's sequential experts, whose weights are parts of two tensors: all experts, or this rank's."""

    spread: Spread | None = None
    """Exchange of rows with the ranks that have the other experts; None if this rank has all."""
    tell_counts: TellCounts | None = None

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, inner))
        for expert in self.local_experts:
            del expert.linear_fc1.weight, expert.linear_fc2.weight
        self._lend(None)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return [n, hidden] for rows [n, hidden], with `counts` rows per expert, times their `weights`, and no
        bias."""
        if self.tell_counts is not None:
            self.tell_counts(counts.tolist())
        if self.spread is None:
            return self._computed(rows, counts, weights), None

        def compute(came: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
            return self._computed(came, torch.tensor(list(each)), torch.ones(len(came), device=came.device))

        return self.spread(rows, counts.tolist(), compute) * weights[:, None], None

    def _computed(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._lend(list(zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)))
        try:
            computed: torch.Tensor = super().forward(rows, counts, weights)[0]
        finally:
            self._lend(None)  # otherwise this forward's graph would live as long as the layer
        return computed

    def _lend(self, views: list[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        """Assign experts their views, to the first ones if the rank holds only some; None removes them."""
        if views is None:
            views = [(None, None)] * len(self.local_experts)  # type: ignore[list-item]
        for expert, lent in zip(self.local_experts, views, strict=False):
            expert.linear_fc1.weight, expert.linear_fc2.weight = lent


def put_in_experts(spec: Any, normalised: bool, column: type, row: type) -> None:
    """Replace the layer of experts in Megatron's local layer specification, with these linear layers."""

    def router(**options: Any) -> PlainRouter:
        return PlainRouter(normalised, **options)

    parts = spec.submodules.mlp.submodules
    parts.router, parts.experts.module = router, PackedExperts
    parts.experts.submodules.linear_fc1, parts.experts.submodules.linear_fc2 = column, row


def expert_settings(config: Any) -> dict[str, Any]:
    """Return Megatron's settings for the experts of a Hugging Face configuration."""
    return {
        "num_moe_experts": expert_count(config.to_dict()),
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }


def is_normalised(config: Any) -> bool:
    """Return whether the weights of a token's experts sum to 1: always for Mixtral, by configuration for Qwen3-MoE."""
    return bool(getattr(config, "norm_topk_prob", True))
