"""Rewards by a sequence classification model with one output, read at the response's last token.

The reward model may have a tokenizer of its own: then it is given the texts, tokenised by it; with the policy's
tokenizer it is given the very tokens that were sampled. Rule: as in `model_scorer`, alone and padded in a
deterministic job.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhf_workers.inference.model_scorer import check_ids, finite, padded_ids
from rlhf_workers.inference.samples import Sample, Scores
from rlhf_workers.role import WorkError


class RewardModelScorer:
    """float32 [1] a sample: the model's one output."""

    frozen = True

    def __init__(self, model: Any, tokenizer: Any | None, device: torch.device) -> None:
        """`tokenizer` is the reward model's own when it differs from the policy's, else None."""
        self.model = model
        self._tokenizer = tokenizer
        self._device = device
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        # Decoder families call the head `score`; anything else is scored alone, through the model's own pooling.
        self._head = getattr(model, "score", None)

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample]) -> list[Scores]:
        """The reward of each sample."""
        if self._tokenizer is not None:
            samples = [self._retokenised(sample) for sample in samples]
        if self._head is None:
            return [self._alone(sample) for sample in samples]
        ids = padded_ids(samples, self._device)
        check_ids(ids, self._vocabulary)
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = torch.tensor([sample.length - 1 for sample in samples], device=self._device)
        outputs = self._head(hidden[torch.arange(len(samples), device=self._device), last])
        return [finite(row.reshape(1), "reward", sample) for row, sample in zip(outputs, samples, strict=True)]

    def _alone(self, sample: Sample) -> Scores:
        ids = padded_ids([sample], self._device)[:, : sample.length]
        check_ids(ids, self._vocabulary)
        return finite(self.model(input_ids=ids).logits.reshape(1), "reward", sample)

    def _retokenised(self, sample: Sample) -> Sample:
        assert self._tokenizer is not None
        ids = self._tokenizer(sample.prompt_text + sample.response_text)["input_ids"]
        if not ids:
            what = f"sample {sample.key.sample} of iteration {sample.key.iteration} has no text for the reward model"
            raise WorkError("SampleInvalid", what)
        return replace(sample, prompt=np.empty(0, np.int32), response=np.asarray(ids, np.int32))


def own_tokenizer(reward: Any, policy: Any) -> Any | None:
    """`reward` when it maps texts to other ids than `policy` does, else None."""
    return None if reward.get_vocab() == policy.get_vocab() else reward
