"""Scores of models equal a plain full forward, in every architecture and any batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import ARCHITECTURES, VOCABULARY, write_policy, write_reward_model

from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, TokenScorer, ValueScorer
from rlhf_workers.inference.rewards.model import RewardModelScorer
from rlhf_workers.models import loading as models

CPU = torch.device("cpu")
TEMPERATURE = 0.7


def random_samples(count: int, seed: int = 0, longest: int = 40) -> list[ScoringSample]:
    rng = np.random.default_rng(seed)
    return [
        ScoringSample(
            key=SampleKey(2, number, 0),
            prompt=rng.integers(3, VOCABULARY, rng.integers(1, longest), dtype=np.int32),
            response=rng.integers(3, VOCABULARY, rng.integers(1, longest), dtype=np.int32),
            prompt_text="1+1=",
            response_text="2",
            record="{}",
        )
        for number in range(count)
    ]


def load(folder: Path, attention: models.Attention = "sdpa") -> Any:
    return models.load_causal_lm(
        str(folder), field="spec.models.actor.path", dtype=torch.float32, device=CPU, attention=attention
    )


def critic(folder: Path, attention: models.Attention = "sdpa") -> models.ValueModel:
    model = models.load_backbone_with_value_head(
        str(folder), field="spec.models.critic.path", dtype=torch.float32, device=CPU, attention=attention
    )
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(1))
    return model


def full(sample: ScoringSample) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([sample.prompt, sample.response]).astype(np.int64))[None]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_a_full_forward_of_each_sample(tmp_path: Path, architecture: str) -> None:
    model = load(write_policy(tmp_path, architecture))
    samples = random_samples(5)
    scores = LogProbabilityScorer(model, TEMPERATURE, CPU).score(samples)
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            logits = model(full(sample)).logits[0] / TEMPERATURE
        wanted = torch.log_softmax(logits, -1)
        rows = torch.arange(len(sample.prompt) - 1, sample.length - 1)
        chosen = wanted[rows, torch.from_numpy(sample.response).long()]
        assert score.dtype == np.float32
        assert score.shape == sample.response.shape
        np.testing.assert_allclose(score, chosen.numpy(), atol=1e-4)


def test_a_model_that_scales_its_logits_is_scored_through_its_own_forward(tmp_path: Path) -> None:
    model = load(write_policy(tmp_path))
    samples = random_samples(2)
    plain = LogProbabilityScorer(model, 1.0, CPU).score(samples)
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    own_forward = model.forward

    class Scaled:  # a model whose forward does more than backbone and head
        config, base_model = model.config, model.base_model

        def __call__(self, **arguments: object) -> object:
            output = own_forward(**arguments)
            output.logits = head(output.logits) * 0.5
            return output

        def get_output_embeddings(self) -> Any:
            return head

    scaled = LogProbabilityScorer(Scaled(), 0.5, CPU).score(samples)
    for result, expected in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_values_are_those_of_the_state_before_each_token(tmp_path: Path) -> None:
    model = critic(write_policy(tmp_path))
    samples = random_samples(5)
    for sample, score in zip(samples, ValueScorer(model, CPU).score(samples), strict=True):
        with torch.no_grad():
            hidden = model.backbone(input_ids=full(sample)).last_hidden_state[0]
        values = (hidden @ model.value_head.weight[0]).numpy()
        np.testing.assert_allclose(score, values[len(sample.prompt) - 1 : -1], atol=1e-4)


@pytest.mark.parametrize("kind", ["reference", "values", "reward"])
def test_alone_scores_are_bitwise_independent_of_everything_else(tmp_path: Path, kind: str) -> None:
    """A deterministic job relies on this: per sample, with eager attention."""
    scorer: TokenScorer | RewardModelScorer
    if kind == "reference":
        scorer = LogProbabilityScorer(load(write_policy(tmp_path, "mistral"), "eager"), 1.0, CPU, blocks=True)
    elif kind == "values":
        scorer = ValueScorer(critic(write_policy(tmp_path, "gemma2"), "eager"), CPU, blocks=True)
    else:
        scorer = RewardModelScorer(classifier(write_reward_model(tmp_path), "eager"), None, CPU)
    samples = random_samples(12)
    forwards = [scorer.score([sample])[0] for sample in samples]
    scorer.score(samples)
    backwards = [scorer.score([sample])[0] for sample in reversed(samples)]
    for result, expected in zip(forwards, reversed(backwards), strict=True):
        assert result.tobytes() == expected.tobytes()


def classifier(folder: Path, attention: models.Attention = "sdpa") -> Any:
    field = "spec.models.reward.model.path"
    return models.load_sequence_classifier(
        str(folder), field=field, dtype=torch.float32, device=CPU, attention=attention
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_a_reward_model_is_read_at_the_last_token(tmp_path: Path, architecture: str) -> None:
    model = classifier(write_reward_model(tmp_path, architecture))
    samples = random_samples(5)
    for sample, score in zip(samples, RewardModelScorer(model, None, CPU).score(samples), strict=True):
        with torch.no_grad():
            wanted = model(full(sample)).logits  # unpadded: the model's own pooling
        np.testing.assert_allclose(score, wanted.numpy().reshape(1), atol=1e-4)


def test_numbers_that_are_not_finite_are_a_failure(tmp_path: Path) -> None:
    model = load(write_policy(tmp_path))
    scorer = LogProbabilityScorer(model, 1.0, CPU)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(WorkError, match="log-probability is nan at sample 0 of iteration 2, token 0"):
        scorer.score(random_samples(2))


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    sample = random_samples(1)[0]
    sample.response[0] = VOCABULARY
    with pytest.raises(WorkError, match=f"token id {VOCABULARY} is outside the model's vocabulary of {VOCABULARY}"):
        LogProbabilityScorer(load(write_policy(tmp_path)), 1.0, CPU).score([sample])
