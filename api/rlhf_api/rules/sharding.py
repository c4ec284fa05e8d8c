"""Rules of `spec.training.parallelism.shard` and `shardOptimizer`, and of ranks with parts of a model (`shard`,
`tensor`).
"""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.common_rules import COPIES, number_of_ranks, ranks_in_cel, ranks_in_words
from rlhf_api.rules.rule import Rule, Values

_PARALLELISM: Final = "spec.training.parallelism"
_FIELD: Final = f"{_PARALLELISM}.shard"
_LORA: Final = "spec.training.lora"
_DRAFT: Final = "spec.generation.speculation.draftModel"
NO_DRAFT_TRAINED: Final = (
    "!has(self.generation.speculation.draftModel) || self.generation.speculation.draftModel.train == 'Disabled'"
)
"""CEL of `trains_no_draft` for node `spec`."""


def of_sharding() -> Iterator[Rule]:
    """Yield the rules of ranks that hold parts of models or of moments."""
    yield Rule(
        field=_FIELD,
        node=_PARALLELISM,
        cel=f"self.shard in [1, {ranks_in_cel('self', COPIES)}]",
        holds=lambda values: values[_FIELD] in (1, number_of_ranks(values, COPIES)),
        message=f"must be 1 or {ranks_in_words(COPIES)}, as all ranks hold one copy between them: use either",
    )
    yield Rule(
        field=_FIELD,
        node=_PARALLELISM,
        cel="self.shard == 1 || self.pipeline == 1",
        holds=lambda values: _whole(values) or values[f"{_PARALLELISM}.pipeline"] == 1,
        message=f"must be 1 with {_PARALLELISM}.pipeline above 1: stages cannot be sharded: use only one of them",
    )
    yield Rule(
        field=_FIELD,
        node="spec.training",
        cel="self.parallelism.shard == 1 || self.backend == 'torch' && !has(self.lora)",
        holds=lambda values: _whole(values) or (values["spec.training.backend"] == "torch" and not values.has(_LORA)),
        message=f"must be 1 with spec.training.backend megatron, and with {_LORA}: neither can be sharded",
    )
    yield Rule(
        field=f"{_PARALLELISM}.shardOptimizer",
        node=_PARALLELISM,
        cel="!self.shardOptimizer || self.shard == 1",
        holds=lambda values: not values[f"{_PARALLELISM}.shardOptimizer"] or _whole(values),
        message="must be false with shard above 1, which also splits moments: use one of them",
    )
    yield from of_parts("shard")


def of_parts(name: str) -> Iterator[Rule]:
    """Yield the rules of a parallelism field that splits models over ranks: unsupported combinations."""
    field, is_one = f"{_PARALLELISM}.{name}", f"self.training.parallelism.{name} == 1"
    yield Rule(
        field=field,
        node="spec",
        cel=f"{is_one} || self.placement == 'Dedicated'",
        holds=lambda values: values[field] == 1 or values["spec.placement"] == "Dedicated",
        message="must be 1 with spec.placement Colocated, as a split model cannot be offloaded: use Dedicated, or 1",
    )
    yield Rule(
        field=field,
        node="spec",
        cel=f"{is_one} || {NO_DRAFT_TRAINED}",
        holds=lambda values: values[field] == 1 or trains_no_draft(values),
        message=f"must be 1 with {_DRAFT}.train Enabled, which needs the whole head on a rank: use Disabled, or 1",
    )


def trains_no_draft(values: Values) -> bool:
    """Return whether no draft model is trained with the policy."""
    return bool(not values.has(_DRAFT) or values[f"{_DRAFT}.train"] == "Disabled")


def _whole(values: Values) -> bool:
    return bool(values[_FIELD] == 1)
