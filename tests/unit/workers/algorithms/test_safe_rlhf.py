"""Safe RLHF: advantages of both critics against a closed form, the law of its multiplier, and its state."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.algorithms.safe_rlhf import SafeReinforcementLearning
from rlhf_workers.training.batches.training_batch import TrainingBatch, micro_batch

CPU = torch.device("cpu")


def algorithm_of(folder: Path, **fields: Any) -> SafeReinforcementLearning:
    job = make_job(folder, algorithm={"safeRlhf": {"miniBatchSize": 8, **fields}})
    return cast(SafeReinforcementLearning, build_algorithm(job.spec, CPU))


def batch_of(costs: float | list[float], **arguments: Any) -> TrainingBatch:
    """Return a batch whose responses have this cost."""
    batch = make_batch("safeRlhf", **arguments)
    cost = torch.full((len(batch.prompts),), costs) if isinstance(costs, float) else torch.tensor(costs)
    return replace(batch, judged={**batch.judged, "cost": cost})


def advantage(deltas: list[float], t: int, gamma: float, gae_lambda: float) -> float:
    return sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:]))


def test_advantages_are_those_of_rewards_less_lambda_times_those_of_costs(folder: Path) -> None:
    """The definition, token by token: sums of temporal differences of r - beta kl and of c + beta kl."""
    beta, gamma, smoothing, lambda_0 = 0.3, 0.9, 0.8, 2.0
    algorithm = algorithm_of(
        folder, klCoefficient=beta, gamma=gamma, gaeLambda=smoothing, initialMultiplier=lambda_0, costLimit=0.5,
        multiplierLearningRate=0.05,
    )  # fmt: skip
    batch = make_batch("safeRlhf", abstained=(2,))
    got = algorithm.prepare(batch)
    valid = [i for i in range(8) if i != 2]
    mean_cost = sum(float(batch.judged["cost"][i]) for i in valid) / len(valid)
    expected_lambda = math.exp(math.log(lambda_0) + 0.05 * (mean_cost - 0.5) * lambda_0)
    assert algorithm.multiplier == pytest.approx(expected_lambda)
    for row in valid:
        count = int(batch.response_lengths[row])
        fields = {name: value[row, :count].double().tolist() for name, value in batch.fields.items()}
        kl = [a - b for a, b in zip(fields["log_probabilities"], fields["reference_log_probabilities"], strict=True)]
        sides = {}
        for name, sign, last, values in (
            ("reward", -1, float(batch.rewards[row]), fields["values"]),
            ("cost", 1, float(batch.judged["cost"][row]), fields["cost_values"]),
        ):
            token_rewards = [sign * beta * k + (last if t == count - 1 else 0) for t, k in enumerate(kl)]
            deltas = [
                token_rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0) - values[t] for t in range(count)
            ]
            sides[name] = [advantage(deltas, t, gamma, smoothing) for t in range(count)]
        for t in range(count):
            wanted = (sides["reward"][t] - expected_lambda * sides["cost"][t]) / (1 + expected_lambda)
            assert float(got.fields["advantages"][row, t]) == pytest.approx(wanted, abs=1e-4)
            assert float(got.fields["cost_returns"][row, t]) == pytest.approx(
                sides["cost"][t] + fields["cost_values"][t], abs=1e-4
            )
    assert not got.fields["advantages"][2].any()


def test_the_divergence_is_estimated_as_the_manifest_says(folder: Path) -> None:
    """With gamma and lambda of 1, the returns at the first token are sums over the response."""
    algorithm = algorithm_of(folder, klCoefficient=0.3, klEstimator="K2", gamma=1.0, gaeLambda=1.0)
    batch = make_batch("safeRlhf")
    got = algorithm.prepare(batch)
    apart = batch.fields["log_probabilities"] - batch.fields["reference_log_probabilities"]
    kl = 0.3 * (0.5 * apart.double().square() * batch.mask).sum(dim=1)
    for returns, wanted in (("returns", batch.rewards - kl), ("cost_returns", batch.judged["cost"] + kl)):
        torch.testing.assert_close(got.fields[returns][:, 0], wanted.float())


def test_lambda_follows_the_mean_cost_of_a_window_of_responses_once_an_iteration(folder: Path) -> None:
    algorithm = algorithm_of(folder, costWindow=12, costLimit=1.0, multiplierLearningRate=0.1, maxMultiplier=4.0)
    nu = 0.0
    seen: list[float] = []
    for cost in [0.0, 3.0, 3.0, 5.0, 9.0, 9.0, 9.0, 9.0, 0.0, 0.0, -4.0, -40.0]:
        algorithm.prepare(batch_of(cost))
        seen = [*seen, *[cost] * 8][-12:]
        nu = min(nu + max(0.1 * (sum(seen) / len(seen) - 1.0) * math.exp(nu), -1.0), math.log(4.0))
        assert algorithm.log_multiplier == pytest.approx(nu)
    assert algorithm.multiplier < 1


def test_lambda_stays_while_the_critics_are_trained_alone(folder: Path) -> None:
    """The policy does not react to it; the costs are of that policy, so the window includes them."""
    algorithm = algorithm_of(folder, criticWarmupIterations=2, costWindow=8)
    for iteration in range(2):
        algorithm.begin_iteration(iteration)
        algorithm.prepare(batch_of(9.0))
    assert (algorithm.multiplier, algorithm.window_mean) == (1.0, 9.0)
    algorithm.begin_iteration(2)
    algorithm.prepare(batch_of(9.0))
    assert algorithm.multiplier > 1.0


def test_a_batch_without_a_judged_response_leaves_lambda_to_the_window(folder: Path) -> None:
    algorithm = algorithm_of(folder)
    algorithm.prepare(batch_of(7.0, abstained=range(8)))
    assert algorithm.multiplier == 1.0
    assert "cost/window_mean" not in algorithm.batch_metrics(algorithm.prepare(batch_of(7.0, abstained=range(8))))
    algorithm.prepare(batch_of([5.0, *[1e6] * 7], abstained=range(1, 8)))
    assert algorithm.log_multiplier == pytest.approx(0.5)


def test_each_critic_learns_its_own_returns(folder: Path) -> None:
    algorithm = algorithm_of(folder, valueClipRange=0)
    batch = algorithm.prepare(make_batch("safeRlhf"))
    rows = list(range(8))
    ready = micro_batch(batch, rows, algorithm.token_weights(batch, rows))
    values = torch.zeros(batch.tokens)
    for method, returns in ((algorithm.value_loss, "returns"), (algorithm.cost_value_loss, "cost_returns")):
        loss, _ = method(values, ready)
        torch.testing.assert_close(loss, 0.5 * ready.fields[returns] ** 2)
    assert not torch.equal(ready.fields["returns"], ready.fields["cost_returns"])
    assert list(algorithm.objectives()) == ["actor", "critic", "cost_critic"]


def test_a_checkpoint_keeps_nu_and_its_window(folder: Path) -> None:
    first, second = algorithm_of(folder), algorithm_of(folder)
    for cost in (2.0, 0.5):
        first.prepare(batch_of(cost))
    second.restore(json.loads(json.dumps(first.state())))
    assert second.window_mean == pytest.approx(1.25)
    after = [item.prepare(batch_of(-1.0)).fields["advantages"] for item in (first, second)]
    assert first.log_multiplier == second.log_multiplier != 0
    assert torch.equal(after[0], after[1])


def test_metrics_say_lambda_nu_and_costs(folder: Path) -> None:
    algorithm = algorithm_of(folder, costLimit=1.0)
    metrics = algorithm.batch_metrics(algorithm.prepare(batch_of(3.0)))
    assert metrics["cost/nu"] == pytest.approx(0.2)
    assert metrics["cost/lambda"] == pytest.approx(math.exp(0.2))
    assert metrics["cost/mean"] == metrics["cost/window_mean"] == pytest.approx(3.0)
    assert metrics["cost/advantage_std"] > 0
    assert {"critic/explained_variance", "cost_critic/explained_variance"} <= metrics.keys()
