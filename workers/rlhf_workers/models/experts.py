"""Computation of a layer's experts, registered with transformers: all rows of an expert at once, or in tiles.

Rule: in `TILED` an expert multiplies tiles of 16 rows, the last one padded with zeros, so that shapes do not depend on
the pass. Must never be used for models of a family not in FAMILIES, whose experts compute differently.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from transformers.integrations.moe import ExpertsInterface

TILED: Final = "tiled"
"""Name of the tiled form, for reproducible results."""
WHOLE: Final = "whole"
"""Name of the whole form."""
EXPERT_ROWS: Final = 16
"""Rows of a tile, as in the smallest decode pass of the deterministic mode."""
FAMILIES: Final = ("mixtral", "qwen3_moe")
"""`model_type`s whose experts are gate, up and down without biases, as computed here."""
EXPERT_FIELDS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""

Feed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [n, hidden], gate and up [2 x inner, hidden], down [hidden, inner]) -> [n, hidden]."""
Compute = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""(rows [n, hidden], expert by expert; number of rows per held expert) -> [n, hidden]."""
Spread = Callable[[torch.Tensor, Sequence[int], Compute], torch.Tensor]
"""Like `Compute` for all experts, if ranks of a group hold some of them each and compute those with the last argument.
A module of experts in parts has it as `spread`.
"""


TellCounts = Callable[[Sequence[int]], None]
"""Receives the number of rows per expert of a layer in a forward; a module of experts may have it as `tell_counts`."""
EXPERTS: Final = ".mlp.experts"
"""Suffix of the names of modules of experts."""


def layers_of_experts(stage: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules of experts of a stage's layers, in order."""
    for name, module in stage.named_modules():
        if name.endswith(EXPERTS):
            yield module


def has_experts(config: Any) -> bool:
    """Return whether layers of a model with this (text) configuration route tokens to experts."""
    return any((getattr(config, name, 0) or 0) > 1 for name in EXPERT_FIELDS)


def in_tiles(model: Any) -> bool:
    """Return whether the experts of a transformers model compute in tiles."""
    return model.config.model_type in FAMILIES and model.config._experts_implementation == TILED


def _mixed(module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, feed: Feed) -> torch.Tensor:
    """Return [n, hidden] for rows [n, hidden] with chosen experts [n, k] and their `weights` [n, k]."""
    chosen = choices.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
    tell: TellCounts | None = getattr(module, "tell_counts", None)
    if tell is not None:
        tell(counts)
    taken = hidden.index_select(0, order // choices.shape[1])

    def compute(rows: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
        # Unbound once: autograd then assembles the packed tensor's gradient once, not per expert.
        experts = zip(rows.split(list(each)), module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True)
        return torch.cat([feed(own, gate_up, down) for own, gate_up, down in experts])

    spread: Spread | None = getattr(module, "spread", None)
    outputs = compute(taken, counts) if spread is None else spread(taken, counts, compute)
    outputs = outputs.index_select(0, order.argsort()).view(*choices.shape, hidden.shape[1]) * weights[..., None]
    result = outputs[:, 0]
    for choice in range(1, choices.shape[1]):
        result = result + outputs[:, choice]
    return result.to(hidden.dtype)


def _whole(module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    def feed(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gated = module._apply_gate(torch.nn.functional.linear(rows, gate_up))
        return torch.nn.functional.linear(gated, down)

    return _mixed(module, hidden, choices, weights, feed)


def _tiled(module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    def feed(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % EXPERT_ROWS))
        outputs = [
            torch.nn.functional.linear(module._apply_gate(torch.nn.functional.linear(tile, gate_up)), down)
            for tile in filled.split(EXPERT_ROWS)
            if len(tile)
        ]
        return torch.cat(outputs)[: len(rows)] if outputs else rows

    return _mixed(module, hidden, choices, weights, feed)


cast(Any, ExpertsInterface).register(TILED, _tiled)
cast(Any, ExpertsInterface).register(WHOLE, _whole)
