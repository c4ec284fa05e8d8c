"""RLOO, REINFORCE++, GSPO and CISPO against their formulas, sample by sample in float64.

The formulas do not use the code under test. Slopes are compared with central differences; detached terms are fixed at
the point of the slope. One response abstained, one has a single token.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_workers.algorithms.base import Algorithm
from rlhf_workers.algorithms.objectives import PolicyTerms
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch, micro_batch

Numbers = npt.NDArray[np.float64]
Formula = Callable[[Numbers, Numbers, Numbers, float], Numbers]
"""(x, x at the point of the slope, o, A) of one response -> loss of each token, without KL and entropy."""
CPU: Final = torch.device("cpu")
ABSTAINED: Final = 5
ONE_TOKEN: Final = 2
ROWS: Final = list(range(8))


def built(folder: Path, algorithm: str, **fields: Any) -> Algorithm:
    fields = {"miniBatchSize": 8, "groupSize": 4, **fields}
    return build_algorithm(make_job(folder, algorithm={algorithm: fields}).spec, CPU)


def batch_of() -> TrainingBatch:
    batch = make_batch(abstained=(ABSTAINED,))
    mask = batch.mask.clone()
    mask[ONE_TOKEN, 1:] = False
    lengths = batch.response_lengths.clone()
    lengths[ONE_TOKEN] = 1
    return replace(batch, mask=mask, response_lengths=lengths)


def response_row(batch: TrainingBatch, name: str, row: int) -> Numbers:
    values: Numbers = batch.fields[name][row, : int(batch.response_lengths[row])].double().numpy()
    return values


def group_of(batch: TrainingBatch, row: int) -> list[int]:
    return [other for other in ROWS if batch.groups[other] == batch.groups[row] and batch.valid[other]]


# ------------------------------------------------------------ advantages


def divergence_of(batch: TrainingBatch, row: int, estimator: str = "K1") -> Numbers:
    d = response_row(batch, "log_probabilities", row) - response_row(batch, "reference_log_probabilities", row)
    return d if estimator == "K1" else d**2 / 2


def whitened(rows: dict[int, Numbers]) -> dict[int, Numbers]:
    every = np.concatenate(list(rows.values()))
    return {row: (values - every.mean()) / np.sqrt(every.var() + 1e-8) for row, values in rows.items()}


def rloo(batch: TrainingBatch, beta: float, estimator: str) -> dict[int, Numbers]:
    rewards = {
        row: float(batch.rewards[row]) - beta * divergence_of(batch, row, estimator).sum()
        for row in ROWS if batch.valid[row]
    }  # fmt: skip
    return {
        row: np.full(
            int(batch.response_lengths[row]), own - np.mean([rewards[o] for o in group_of(batch, row) if o != row])
        )
        for row, own in rewards.items()
    }


def returns(batch: TrainingBatch, beta: float, gamma: float) -> dict[int, Numbers]:
    result = {}
    for row in ROWS:
        rewards = -beta * divergence_of(batch, row)
        rewards[-1] += float(batch.rewards[row])
        discounts = [gamma ** np.arange(len(rewards) - t) for t in range(len(rewards))]
        result[row] = np.array([(discounts[t] * rewards[t:]).sum() for t in range(len(rewards))])
    return whitened({row: values for row, values in result.items() if batch.valid[row]})


def group_mean(batch: TrainingBatch, beta: float) -> dict[int, Numbers]:
    rewards = {row: float(batch.rewards[row]) - beta * divergence_of(batch, row).sum() for row in ROWS}
    centred = {}
    for row in (row for row in ROWS if batch.valid[row]):
        own = rewards[row] - np.mean([rewards[other] for other in group_of(batch, row)])
        centred[row] = np.full(int(batch.response_lengths[row]), own)
    return whitened(centred)


def grpo(batch: TrainingBatch) -> dict[int, Numbers]:
    result = {}
    for row in (row for row in ROWS if batch.valid[row]):
        rewards = batch.rewards[group_of(batch, row)].double().numpy()
        own = (float(batch.rewards[row]) - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        result[row] = np.full(int(batch.response_lengths[row]), own)
    return result


ADVANTAGES: Final[dict[str, tuple[str, dict[str, Any], Callable[[TrainingBatch], dict[int, Numbers]]]]] = {
    "rloo": ("rloo", {"klCoefficient": 0.3}, lambda batch: rloo(batch, 0.3, "K1")),
    "rloo K2": ("rloo", {"klCoefficient": 0.3, "klEstimator": "K2"}, lambda batch: rloo(batch, 0.3, "K2")),
    "rloo, KL in the loss": ("rloo", {"klIn": "Loss"}, lambda batch: rloo(batch, 0.0, "K1")),
    "reinforce++": ("reinforcePlusPlus", {"klCoefficient": 0.2, "gamma": 0.9}, lambda batch: returns(batch, 0.2, 0.9)),
    "reinforce++, undiscounted": ("reinforcePlusPlus", {"klCoefficient": 0.0}, lambda batch: returns(batch, 0.0, 1.0)),
    "reinforce++ baseline": (
        "reinforcePlusPlus",
        {"klCoefficient": 0.2, "baseline": "GroupMean"},
        lambda batch: group_mean(batch, 0.2),
    ),
    "gspo": ("gspo", {}, grpo),
    "cispo": ("cispo", {}, grpo),
}


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_are_those_of_the_formula(case: str, folder: Path) -> None:
    name, fields, formula = ADVANTAGES[case]
    batch = batch_of()
    got, expected = built(folder, name, **fields).prepare(batch).fields["advantages"], formula(batch)
    assert not got[ABSTAINED].any()
    for row, values in expected.items():
        np.testing.assert_allclose(got[row, : len(values)].numpy(), values, rtol=2e-5, atol=1e-6)
        assert not got[row, len(values) :].any()


@pytest.mark.parametrize("name", ["rloo", "gspo", "cispo"])
def test_who_is_alone_in_a_group_has_nothing_to_learn(name: str, folder: Path) -> None:
    batch = make_batch(abstained=(1, 2, 3, 4, 5, 6, 7))
    assert not built(folder, name, klCoefficient=0).prepare(batch).fields["advantages"].any()


# ------------------------------------------------------------ losses


def surrogate(ratio: Numbers, advantage: float, low: float, high: float) -> Numbers:
    result: Numbers = -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    return result


def rloo_sequence(x: Numbers, at: Numbers, o: Numbers, advantage: float) -> Numbers:
    return np.full(len(x), surrogate(np.exp(np.clip((x - o).sum(), -20, 20)), advantage, 0.2, 0.2))


def by_token(x: Numbers, at: Numbers, o: Numbers, advantage: float) -> Numbers:
    return surrogate(np.exp(np.clip(x - o, -20, 20)), advantage, 0.2, 0.2)


def gspo_sequence(x: Numbers, at: Numbers, o: Numbers, advantage: float) -> Numbers:
    return np.full(len(x), surrogate(np.exp(np.clip((x - o).mean(), -20, 20)), advantage, 3e-4, 4e-4))


def gspo_token(x: Numbers, at: Numbers, o: Numbers, advantage: float) -> Numbers:
    return surrogate(np.exp(np.clip(x - at + (at - o).mean(), -20, 10)), advantage, 3e-4, 4e-4)


def cispo(x: Numbers, at: Numbers, o: Numbers, advantage: float) -> Numbers:
    return -np.clip(np.exp(np.clip(at - o, -20, 20)), 0.3, 1.4) * advantage * x


LOSSES: Final[dict[str, tuple[str, dict[str, Any], Formula]]] = {
    "rloo sequence": ("rloo", {}, rloo_sequence),
    "rloo token": ("rloo", {"ratioLevel": "Token"}, by_token),
    "reinforce++": ("reinforcePlusPlus", {"lossAggregation": "SequenceMean"}, by_token),
    "gspo": ("gspo", {}, gspo_sequence),
    "gspo token": ("gspo", {"ratioLevel": "Token"}, gspo_token),
    "cispo": ("cispo", {"clipRange": 0.7, "clipRangeHigh": 0.4, "lossAggregation": "SequenceMean"}, cispo),
}
MOVES: Final = {"on policy": 0.0, "near": 2e-4, "moved": 0.3, "far": 100.0}
"""Size of log-ratios: none, within GSPO's clip range, within and beyond PPO's, beyond any limit."""


def losses_of(algorithm: Algorithm, cut: MicroBatch, log_p: torch.Tensor) -> torch.Tensor:
    terms = algorithm.policy_loss(log_p, torch.zeros_like(log_p), cut)
    assert isinstance(terms, PolicyTerms)
    return (cut.weights["actor"] * terms.policy).sum()


def cut_of(algorithm: Algorithm, ready: TrainingBatch, rows: list[int]) -> MicroBatch:
    """Return a micro-batch in float64, with the weights of the whole mini-batch."""
    cut = micro_batch(ready, rows, algorithm.token_weights(ready, ROWS))
    weights, fields = ({name: value.double() for name, value in part.items()} for part in (cut.weights, cut.fields))
    return replace(cut, weights=weights, fields=fields)


def moved(old: torch.Tensor, size: float) -> torch.Tensor:
    draws = np.random.default_rng(3)
    signs = torch.tensor(draws.choice([-1.0, 1.0], len(old)))
    return (old + size * (signs if size > 1 else torch.tensor(draws.normal(size=len(old))))).requires_grad_()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("case", LOSSES)
def test_losses_and_slopes_are_those_of_the_formula(case: str, move: str, folder: Path) -> None:
    name, fields, formula = LOSSES[case]
    algorithm = built(folder, name, klCoefficient=0, **fields)
    ready = algorithm.prepare(batch_of())
    constant = ready.fields["advantages"].clone()  # REINFORCE++ has one a token: here one a response, 0 in one of them
    constant[:] = constant[:, :1] * ready.mask
    constant[0] = 0.0
    cut = cut_of(algorithm, replace(ready, fields={**ready.fields, "advantages": constant}), ROWS)
    log_p = moved(cut.fields["log_probabilities"], MOVES[move])
    responses = sum(bool(row.any()) for row in ready.mask)

    def total(x: Numbers, at: Numbers) -> float:
        result = 0.0
        for sample in range(8):
            own = (cut.samples == sample).numpy()
            if own.any():
                old, advantage = cut.fields["log_probabilities"].numpy()[own], float(constant[sample, 0])
                result += float(formula(x[own], at[own], old, advantage).mean()) / responses
        return result

    loss = losses_of(algorithm, cut, log_p)
    (slope,) = torch.autograd.grad(loss, log_p)
    at, step = log_p.detach().numpy(), 1e-6
    assert loss.item() == pytest.approx(total(at, at), rel=1e-6, abs=1e-7)
    if move != "on policy":  # there both branches are equal
        ends = [(at + step * unit, at - step * unit) for unit in np.eye(len(at))]
        numeric = np.array([(total(up, at) - total(down, at)) / (2 * step) for up, down in ends])
        np.testing.assert_allclose(slope.numpy(), numeric, rtol=1e-4, atol=1e-6 + 1e-9 * abs(loss.item()) / step)
    assert torch.isfinite(slope).all()


def test_on_policy_the_slope_is_that_of_reinforce(folder: Path) -> None:
    """The slope is -A times the slope of x for each token of the mean, for any ratio; RLOO's sequence form sums."""
    for case, (name, fields, _) in LOSSES.items():
        algorithm = built(folder, name, klCoefficient=0, **fields)
        cut = cut_of(algorithm, algorithm.prepare(batch_of()), ROWS)
        log_p = cut.fields["log_probabilities"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(losses_of(algorithm, cut, log_p), log_p)
        weights = cut.weights["actor"]
        if case == "rloo sequence":
            weights = cut.sum_by_sample(weights)[cut.samples]
        torch.testing.assert_close(slope, -weights * cut.fields["advantages"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", LOSSES)
def test_micro_batches_add_up_to_the_mini_batch(case: str, folder: Path) -> None:
    name, fields, _ = LOSSES[case]
    algorithm = built(folder, name, klCoefficient=0, **fields)
    ready = algorithm.prepare(batch_of())

    def loss_of(rows: list[int]) -> float:
        cut = cut_of(algorithm, ready, rows)
        return losses_of(algorithm, cut, cut.fields["log_probabilities"] + 0.1 * cut.targets % 1).item()

    parts = sum(loss_of(rows) for rows in ([6, 1], [0], [ABSTAINED], [7, 3, 2, 4]))
    assert parts == pytest.approx(loss_of(ROWS), rel=1e-9)


@pytest.mark.parametrize("case", LOSSES)
def test_a_batch_that_abstained_throughout_has_no_loss_and_no_slope(case: str, folder: Path) -> None:
    name, fields, _ = LOSSES[case]
    algorithm = built(folder, name, **fields)
    cut = cut_of(algorithm, algorithm.prepare(make_batch(abstained=ROWS)), ROWS)
    log_p = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    assert losses_of(algorithm, cut, log_p).item() == 0


@pytest.mark.parametrize(
    ("case", "move", "low", "high"),
    [("cispo", 2.0, 0.5, 0.5), ("gspo", 0.3, 0.0, 1.0), ("rloo token", 0.01, 0.0, 0.0)],
)
def test_clipping_says_at_which_end(case: str, move: float, low: float, high: float, folder: Path) -> None:
    """All advantages are 1; half of the tokens move up and half down for CISPO, all move up for the others."""
    name, fields, _ = LOSSES[case]
    algorithm = built(folder, name, klCoefficient=0, **fields)
    ready = algorithm.prepare(batch_of()).with_fields(
        advantages=torch.ones_like(batch_of().rewards)[:, None].expand(8, 13)
    )
    cut = cut_of(algorithm, ready, ROWS)
    signs = torch.ones(len(cut.samples), dtype=torch.float64)
    if case == "cispo":
        signs[::2] = -1.0
    terms = algorithm.policy_loss(cut.fields["log_probabilities"] + move * signs, torch.zeros_like(signs), cut)
    assert isinstance(terms, PolicyTerms)
    shares = [float(side.double().mean()) for side in (terms.clipped_low, terms.clipped_high)]
    assert shares == pytest.approx([low, high], abs=0.02)
