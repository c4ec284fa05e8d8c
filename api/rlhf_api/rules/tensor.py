"""Rules of `spec.training.parallelism.tensor`, `criticTensor` and `sequenceParallel`: valid sizes, and combinations
that stages in parts do not support."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import NO_DRAFT_TRAINED, of_parts, trains_no_draft

_PARALLELISM: Final = "spec.training.parallelism"
_FIELD: Final = f"{_PARALLELISM}.tensor"
_CRITIC: Final = f"{_PARALLELISM}.criticTensor"


def of_tensor() -> Iterator[Rule]:
    """Yield the rules of tensor parallel ranks."""
    yield Rule(
        field=_FIELD,
        node=_PARALLELISM,
        cel="self.tensor in [1, 2, 4, 8, 16, 32, 64]",
        holds=lambda values: values[_FIELD] in (1, 2, 4, 8, 16, 32, 64),
        message="must be a power of two, as heads are split: use 1, 2, 4, 8, 16, 32 or 64",
    )
    yield Rule(
        field=_FIELD,
        node="spec.training",
        cel="self.parallelism.tensor == 1 || self.backend == 'megatron'",
        holds=lambda values: _whole(values) or values["spec.training.backend"] == "megatron",
        message="must be 1 with spec.training.backend torch, whose layers are not split: use megatron, or 1",
    )
    yield Rule(
        field=f"{_PARALLELISM}.sequenceParallel",
        node=_PARALLELISM,
        cel="self.sequenceParallel == 'Disabled' || self.tensor > 1",
        holds=lambda values: values[f"{_PARALLELISM}.sequenceParallel"] == "Disabled" or not _whole(values),
        message="must be Disabled with tensor 1: raise tensor, or use Disabled",
    )
    yield from of_parts("tensor")
    yield Rule(
        field=_CRITIC,
        node=_PARALLELISM,
        cel=(
            "!has(self.criticTensor) || self.criticTensor in [1, 2, 4, 8, 16, 32, 64]"
            " && self.pipeline * self.tensor % self.criticTensor == 0"
        ),
        holds=lambda values: not values.has(_CRITIC) or _divides(values),
        message="must be a power of two that divides pipeline x tensor: use one, or leave it out",
    )
    yield Rule(
        field=_CRITIC,
        node="spec",
        cel=(
            "!has(self.training.parallelism.criticTensor) || self.training.backend == 'megatron' && self.placement =="
            f" 'Dedicated' && ({NO_DRAFT_TRAINED})"
        ),
        holds=lambda values: not values.has(_CRITIC) or _may_split(values),
        message="needs backend megatron, placement Dedicated and no trained draftModel: set those, or leave it out",
    )


def _divides(values: Values) -> bool:
    ranks = values[f"{_PARALLELISM}.pipeline"] * values[_FIELD]
    return values[_CRITIC] in (1, 2, 4, 8, 16, 32, 64) and ranks % values[_CRITIC] == 0


def _may_split(values: Values) -> bool:
    dedicated = values["spec.training.backend"] == "megatron" and values["spec.placement"] == "Dedicated"
    return dedicated and trains_no_draft(values)


def _whole(values: Values) -> bool:
    return bool(values[_FIELD] == 1)
