"""Supervised fine-tuning on a file of prompts with their responses: fields and graph, without generation or scoring.

Its loss is `rlhf_workers.algorithms.sft`.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithms.fields import AlgorithmFields, Epochs, MiniBatchSize
from rlhf_api.algorithms.graph import TRAIN_ON_RESPONSES

ResponseKey = Annotated[str, Field(min_length=1, max_length=253)]


class SFT(AlgorithmFields):
    """Supervised fine-tuning: the actor learns the responses of spec.prompts.path, token by token."""

    summary: ClassVar = "Supervised fine-tuning on responses of the prompt file; nothing is generated."
    all_tasks: ClassVar = (TRAIN_ON_RESPONSES,)

    response_key: ResponseKey = "response"
    """Key of the response in each object of spec.prompts.path: a string, to which the end-of-sequence token is added,
    or with spec.prompts.chatTemplate also a list of messages."""
    epochs: Epochs = 1
    """Passes over the samples of a batch."""
    mini_batch_size: MiniBatchSize = 64
    """Samples per optimizer step; must divide rollout.batchSize."""

    @property
    def responses_per_prompt(self) -> int:
        return 1

    @property
    def response_keys(self) -> tuple[str, ...]:
        return (self.response_key,)
