"""Algorithms on pairs: gradients equal those of transformers' own models on whole pairs, for any split."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.support.algorithms import member
from tests.support.training.training_ranks import CPU, gradients_of, make_batch, make_job, serial

from rlhf_api.algorithms.graph import SampleField
from rlhf_workers.algorithms.pair_objectives import PREFERENCE
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.training.batches.minibatches import epoch_order, split
from rlhf_workers.training.batches.training_batch import TrainingBatch

PAIRS = 4
BETA = 0.4


def tokens_of(batch: TrainingBatch, row: int) -> torch.Tensor:
    return torch.cat([batch.prompts[row], batch.responses[row, : int(batch.response_lengths[row])]])[None]


def assert_gradients(ours: dict[str, torch.Tensor], model: Any, role: str) -> None:
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max()) or 1.0
        assert ours[f"{role}:{name}"] == pytest.approx(parameter.grad, abs=3e-5 * scale), name


def better_and_worse(algorithm: str, batch: TrainingBatch) -> list[tuple[int, int]]:
    """Return the rows of each pair, the better one first, without pairs in which a response has no reward."""
    if algorithm != "onlineDpo":
        return [(2 * pair, 2 * pair + 1) for pair in range(PAIRS)]
    rows = [(a, a + 1) if batch.rewards[a] >= batch.rewards[a + 1] else (a + 1, a) for a in range(0, 2 * PAIRS, 2)]
    return [(a, b) for a, b in rows if batch.valid[a] and batch.valid[b]]


@pytest.mark.parametrize(("algorithm", "loss"), [("dpo", "Sigmoid"), ("dpo", "IPO"), ("onlineDpo", "Sigmoid")])
def test_dpo_has_the_gradient_of_its_formula(algorithm: str, loss: str, folder: Path) -> None:
    chosen = member(algorithm, loss=loss, beta=BETA, labelSmoothing=0.1)
    job, batch = (
        make_job(folder, algorithm=chosen, rollout={"batchSize": 8}),
        make_batch(abstained=(5,) * (algorithm != "dpo")),
    )
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    pairs = better_and_worse(algorithm, batch)

    def log_ratio(row: int) -> torch.Tensor:
        tokens, length = tokens_of(batch, row), int(batch.response_lengths[row])
        every = torch.log_softmax(policy(tokens).logits[0, -length - 1 : -1], -1)
        log_p = every[torch.arange(length), tokens[0, -length:]]
        return (log_p - batch.fields[SampleField.REFERENCE_LOG_PROBABILITIES][row, :length]).sum()

    total = torch.zeros(())
    for better, worse in pairs:
        difference = log_ratio(better) - log_ratio(worse)
        scaled = torch.sigmoid(BETA * difference)
        sigmoid = -0.9 * scaled.log() - 0.1 * (1 - scaled).log()
        total = total + (sigmoid if loss == "Sigmoid" else (difference - 1 / (2 * BETA)) ** 2)
    (total / len(pairs)).backward()
    assert_gradients(gradients_of(job, serial(job, 2, 1, ("actor",)), 2, batch), policy, "actor")


def test_a_reward_model_has_the_gradient_of_a_classifier_read_at_the_last_token(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)  # of the head, which the folder lacks
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, attn_implementation="eager"
    )
    classifier.save_pretrained(tmp_path / "classifier")
    fields = member("rewardModel", margin=0.3, centeringCoefficient=0.05)
    sources = {"actor": {"path": str(folder)}, "reward": {"model": {"path": str(tmp_path / "classifier")}}}
    job, batch = make_job(folder, algorithm=fields, rollout={"batchSize": 8}, models=sources), make_batch()
    total = torch.zeros(())
    for better, worse in better_and_worse("rewardModel", batch):
        high, low = (
            classifier.score(classifier.model(tokens_of(batch, row)).last_hidden_state[0, -1])[0]
            for row in (better, worse)
        )
        total = total - torch.sigmoid(high - low - 0.3).log() + 0.05 * (high + low) ** 2
    (total / PAIRS).backward()
    assert_gradients(gradients_of(job, serial(job, 2, 1, ("reward",)), 2, batch), classifier, "reward")


def test_of_two_sampled_responses_the_one_with_more_reward_is_better_and_of_equal_ones_the_first(folder: Path) -> None:
    job = make_job(folder, algorithm=member("onlineDpo"), rollout={"batchSize": 8})
    batch = make_batch(abstained=(7,))
    batch.rewards[:8] = torch.tensor([1.0, 2.0, 2.0, 1.0, 3.0, 3.0, 5.0, 0.0])
    ready = build_algorithm(job.spec, CPU).prepare(batch)
    assert ready.fields[PREFERENCE][:, 0].tolist() == [-1, 1, 1, -1, 1, -1, 0, 0]
    assert not ready.mask[6:].any()
    assert build_algorithm(job.spec, CPU).batch_metrics(ready)["reward/tied_pairs"] == pytest.approx(1 / 3)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_pairs_stay_next_to_each_other_in_every_micro_batch(
    replicas: int, microbatches: int, pairs: int, data: st.DataObject
) -> None:
    count = 2 * replicas * microbatches * pairs
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
    order = epoch_order(3, 1, 0, count, 2)
    dealt = [samples for replica in split(order, lengths, replicas, microbatches, 2) for samples in replica]
    assert sorted(sample for samples in dealt for sample in samples) == list(range(count))
    for samples in dealt:
        assert [sample % 2 for sample in samples] == [0, 1] * pairs
        assert all(first + 1 == second for first, second in zip(samples[::2], samples[1::2], strict=True))
