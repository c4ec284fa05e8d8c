"""Shared manifest fields of algorithms on pairs of responses: keys in the prompt file, and the rule that keeps pairs
whole."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithms.fields import AlgorithmFields, Epochs, MiniBatchSize
from rlhf_api.rules.rule import Rule

PAIR = 2
"""Samples of a pair."""
Key = Annotated[str, Field(min_length=1, max_length=253)]


class PairFields(AlgorithmFields):
    """An algorithm that compares two responses to a prompt. Both are neighbours in one micro-batch."""

    samples_per_unit: ClassVar = PAIR

    epochs: Epochs = 1
    """Passes over the samples of a batch."""
    mini_batch_size: MiniBatchSize = 64
    """Samples (two per pair) per optimizer step; must divide rollout.batchSize."""

    @property
    def responses_per_prompt(self) -> int:
        return PAIR

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        field = "spec.training.microBatchSize"
        yield Rule(
            field=field,
            node="spec",
            cel=f"!has({path.replace('spec.', 'self.', 1)}) || self.training.microBatchSize % {PAIR} == 0",
            holds=lambda values: not values.has(path) or values[field] % PAIR == 0,
            message=f"must be even with algorithm {path.rsplit('.', 1)[-1]}, because a micro-batch "
            "holds both responses of a pair: use a multiple of 2",
        )


class FilePairFields(PairFields):
    """Pairs from spec.prompts.path."""

    chosen_key: Key = "chosen"
    """Key of the better response in each object of spec.prompts.path: a string, to which the end-of-sequence token is
    added, or with spec.prompts.chatTemplate also a list of messages."""
    rejected_key: Key = "rejected"
    """Key of the worse response, like chosenKey."""

    @property
    def response_keys(self) -> tuple[str, ...]:
        return (self.chosen_key, self.rejected_key)
