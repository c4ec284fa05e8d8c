"""No algorithm trains on tokens of an environment: a batch with them is equivalent to one without."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.algorithms import member
from tests.support.model_folders import models
from tests.support.training.training_ranks import PPO_FIELDS, make_batch, make_job, make_samples

from rlhf_api.algorithms import ALGORITHMS, full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import Group
from rlhf_common.samples import NOT_SAMPLED
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.failures import WorkError
from rlhf_workers.losses.gae import advantages_and_returns, token_rewards
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from, micro_batch

CPU = torch.device("cpu")
GENERATING = [name for name in ALGORITHMS if full_graph(name).tasks_of(Group.GENERATION)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("model"), "llama", seed=1)


def with_holes(batch: TrainingBatch) -> tuple[TrainingBatch, list[list[int]]]:
    """Return the batch with foreign tokens after each second token, and the positions of the batch's own tokens."""
    width = 2 * batch.responses.shape[1]
    places = [[t + t // 2 for t in range(int(length))] for length in batch.response_lengths]

    def spread(values: torch.Tensor, fill: float) -> torch.Tensor:
        wide = torch.full((len(values), width), fill, dtype=values.dtype)
        for row, own in enumerate(places):
            wide[row, own] = values[row, : len(own)]
        return wide

    mask = spread(batch.mask, 0)
    lengths = torch.tensor([own[-1] + 1 for own in places])
    fields = {name: spread(values, 0.0 if name == SAMPLED_FIELD else 3.0) for name, values in batch.fields.items()}
    return replace(
        batch, responses=spread(batch.responses, 5), response_lengths=lengths, mask=mask, fields=fields
    ), places


@pytest.mark.parametrize("name", GENERATING)
def test_every_algorithm_passes_over_tokens_that_the_policy_did_not_write(name: str, folder: Path) -> None:
    spec = make_job(folder, folder, algorithm=member(name)).spec
    plain = make_batch(name, abstained=(1,))
    holed, places = with_holes(plain)
    prepared, prepared_holed = build_algorithm(spec, CPU).prepare(plain), build_algorithm(spec, CPU).prepare(holed)
    for field in build_algorithm(spec, CPU).prepared:
        for row, own in enumerate(places):
            wanted = prepared.fields[field][row, : len(own)]
            torch.testing.assert_close(prepared_holed.fields[field][row, own], wanted, msg=f"{field} of sample {row}")
        assert not prepared_holed.fields[field][~holed.mask].any()
    rows = [0, 1, 2, 3]
    cuts = []
    for batch in (prepared, prepared_holed):
        algorithm = build_algorithm(spec, CPU)
        cuts.append(micro_batch(batch, rows, algorithm.token_weights(batch, rows)))
    assert torch.equal(cuts[0].targets, cuts[1].targets)
    assert torch.equal(cuts[0].samples, cuts[1].samples)
    for role, weights in cuts[0].weights.items():
        torch.testing.assert_close(cuts[1].weights[role], weights)


def test_the_state_before_a_trained_token_is_that_of_whatever_stands_there() -> None:
    holed, places = with_holes(make_batch())
    cut = micro_batch(holed, [2], {})
    first = len(holed.prompts[2]) - 1
    assert cut.positions.tolist() == [first + place for place in places[2]]


def test_values_after_a_hole_are_those_of_the_next_token_of_the_policy() -> None:
    mask = torch.tensor([[True, False, False, True, False]])
    rewards = token_rewards(torch.tensor([1.0]), torch.zeros(1, 5), mask, 0.1)
    assert rewards.tolist() == [[0, 0, 0, 1, 0]]
    values = torch.tensor([[0.5, 9.0, 9.0, 0.25, 9.0]])
    advantages, returns = advantages_and_returns(rewards, values, mask, 0.5, 0.5)
    last = 1 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * last
    assert advantages.tolist() == [[first, 0, 0, last, 0]]
    assert returns.tolist() == [[first + 0.5, 0, 0, 1.0, 0]]


def marked(places: Sequence[int], value: float = NOT_SAMPLED) -> list[object]:
    samples = make_samples(abstained=(1,))
    numbers = unpack(samples[3].fields["log_probabilities"]).copy()
    numbers[list(places)] = value
    samples[3].fields["log_probabilities"].CopyFrom(pack(numbers))
    return list(samples)


def test_what_an_environment_wrote_is_outside_the_mask_and_zero() -> None:
    batch = batch_from(marked([0]), 8, PPO_FIELDS, holes=True)  # type: ignore[arg-type]
    length = int(batch.response_lengths[3])
    assert batch.mask[3].tolist() == [0 < t < length for t in range(batch.mask.shape[1])]
    assert batch.fields["log_probabilities"][3, 0] == 0
    assert not batch.mask[1].any()
    assert all(bool(torch.isfinite(values).all()) for values in batch.fields.values())


@pytest.mark.parametrize(("value", "holes"), [(NOT_SAMPLED, False), (np.nan, True), (-np.inf, True)])
def test_numbers_that_are_none_are_refused_where_no_environment_wrote(value: float, *, holes: bool) -> None:
    with pytest.raises(WorkError, match="sample 3: log_probabilities holds a value that is not a finite number"):
        batch_from(marked([0], value), 8, PPO_FIELDS, holes=holes)  # type: ignore[arg-type]
