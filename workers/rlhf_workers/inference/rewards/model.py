"""Rewards from a sequence classification model with one output, read after the response.

A reward model whose tokenizer, end-of-sequence token or chat template differs from the policy's reads the conversation
as `model_text` renders it; otherwise it gets the sampled tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rewards import GivenReward
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.inference.model_scorer import check_ids, finite_each, padded_ids, scoring_attention
from rlhf_workers.inference.rewards.model_text import OwnTokenizer, difference
from rlhf_workers.models import loading as models
from rlhf_workers.models.precision import compute_dtype

log = logging.getLogger(__name__)


def load_reward(entry: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> "RewardModelScorer":
    """Return the scorer of a reward's `model`, with its model loaded on `home`."""
    assert entry.reward.model is not None
    path, field = entry.reward.model.path, f"{entry.field}.model.path"
    dtype, attention = compute_dtype(spec), scoring_attention(spec)
    model = models.load_sequence_classifier(path, field=field, dtype=dtype, device=home, attention=attention)
    policy = models.load_tokenizer(spec.models.actor.path, "spec.models.actor.path")
    tokenizer = models.load_tokenizer(path, field)
    differs = difference(tokenizer, policy, spec)
    own = OwnTokenizer(tokenizer, spec, field) if differs else None
    whose = (
        f"by its own tokenizer and chat template: its {differs} is not the actor's"
        if differs
        else "as the actor's tokens"
    )
    log.info("%s: %s reads prompts and responses %s", field, path, whose)
    return RewardModelScorer(model, own, device)


class RewardModelScorer:
    """Scores a sample as the model's one output, float32 [1]."""

    frozen = True

    def __init__(self, model: Any, tokenizer: OwnTokenizer | None, device: torch.device) -> None:
        """`tokenizer` is the reward model's own, or None to score the policy's tokens."""
        self.model = model
        self._tokenizer = tokenizer
        self._device = device
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        # Decoder families call the head `score`; other models score one sample at a time, through their own pooling.
        self._head = getattr(model, "score", None)

    @torch.inference_mode()
    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        """Return the reward of each sample."""
        if self._tokenizer is not None:
            tokens = [(sample, self._tokenizer.tokens(sample)) for sample in samples]
            samples = [replace(sample, prompt=np.empty(0, np.int32), response=ids) for sample, ids in tokens]
        if self._head is None:
            return [self._alone(sample) for sample in samples]
        padded = padded_ids(samples)
        check_ids(padded, self._vocabulary)
        ids = to_device(padded, self._device)
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = torch.tensor([sample.length - 1 for sample in samples], device=self._device)
        outputs = self._head(hidden[torch.arange(len(samples), device=self._device), last])
        return finite_each([row.reshape(1) for row in outputs], "reward", samples)

    def _alone(self, sample: ScoringSample) -> FloatArray:
        own = padded_ids([sample])[:, : sample.length]
        check_ids(own, self._vocabulary)
        logits = self.model(input_ids=to_device(own, self._device)).logits
        return finite_each([logits.reshape(1)], "reward", [sample])[0]
