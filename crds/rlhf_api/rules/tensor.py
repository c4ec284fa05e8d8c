"""Rules of `spec.training.parallelism.tensor` and `sequenceParallel`: which sizes there are, and what stages in parts
cannot do yet."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import of_parts

_PARALLELISM: Final = "spec.training.parallelism"
_FIELD: Final = f"{_PARALLELISM}.tensor"


def of_tensor() -> Iterator[Rule]:
    """Yield every rule of training ranks that hold a stage together. Parts over data ranks need another backend."""
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


def _whole(values: Values) -> bool:
    return bool(values[_FIELD] == 1)
