"""Rules of `spec.training.parallelism.context`, ranks that split samples by position: unsupported combinations."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import NO_DRAFT_TRAINED, trains_no_draft

_FIELD: Final = "spec.training.parallelism.context"


def of_context() -> Iterator[Rule]:
    """Yield the rules of context parallel ranks."""
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=(
            "self.training.parallelism.context == 1 || self.training.parallelism.sequenceParallel == 'Disabled' &&"
            f" ({NO_DRAFT_TRAINED})"
        ),
        holds=lambda values: values[_FIELD] == 1 or _may_cut(values),
        message="must be 1 unless sequenceParallel is Disabled and no draftModel is trained: use 1, or set those",
    )


def _may_cut(values: Values) -> bool:
    return values["spec.training.parallelism.sequenceParallel"] == "Disabled" and trains_no_draft(values)
