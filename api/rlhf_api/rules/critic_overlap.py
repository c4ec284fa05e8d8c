"""Rules of `spec.training.criticOverlap`: critics that train separately from the policy, during decoding."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.algorithms import ALGORITHMS, full_graph
from rlhf_api.rules.rule import Rule, Values

_FIELD: Final = "spec.training.criticOverlap"
_MODE: Final = "spec.fusion.intraStage.mode"
_FUSED: Final = ("Fused", "FusedSplit")
_SEVERAL: Final = tuple(name for name in ALGORITHMS if len(full_graph(name).trained) > 1)
"""Algorithms with several training tasks in their full graph."""


def of_critic_overlap() -> Iterator[Rule]:
    """Yield the rules of critics that train while the next batch decodes."""
    off = "self.training.criticOverlap == 'Disabled'"
    chosen = " || ".join(f"has(self.algorithm.{name})" for name in _SEVERAL)
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=f"{off} || {chosen}",
        holds=lambda values: _off(values) or any(values.has(f"spec.algorithm.{name}") for name in _SEVERAL),
        message="needs an algorithm that trains several models: use ppo, or Disabled",
    )
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=f"{off} || self.placement == 'Dedicated'",
        holds=lambda values: _off(values) or values["spec.placement"] == "Dedicated",
        message="must be Disabled with spec.placement Colocated, where roles take turns on the device: use Dedicated",
    )
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=f"{off} || !(self.fusion.intraStage.mode in ['Fused', 'FusedSplit'])",
        holds=lambda values: _off(values) or values[_MODE] not in _FUSED,
        message=f"must be Disabled with {_MODE} Fused or FusedSplit: use one of them",
    )


def _off(values: Values) -> bool:
    return bool(values[_FIELD] == "Disabled")
