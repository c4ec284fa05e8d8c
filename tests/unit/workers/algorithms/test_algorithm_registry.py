"""Both registries have the same algorithms, and each answers the trainer's questions with the right shapes."""

from pathlib import Path

import pytest
import torch
from tests.support.algorithms import SMALL, member
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_api.algorithms import ALGORITHMS, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.algorithms.registry import IMPLEMENTATIONS, build_algorithm

CPU = torch.device("cpu")


def spec_of(folder: Path, algorithm: str) -> RLHFJobSpec:
    return make_job(folder, folder, algorithm=member(algorithm)).spec


def test_contract_workers_and_tests_know_the_same_algorithms() -> None:
    assert set(ALGORITHMS) == set(IMPLEMENTATIONS) == set(SMALL)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_prepared_batch_has_every_field_that_is_promised_and_zero_outside_its_mask(name: str, folder: Path) -> None:
    algorithm, batch = build_algorithm(spec_of(folder, name), CPU), make_batch(name, abstained=(1,))
    ready = algorithm.prepare(batch)
    assert ready.fields.keys() - batch.fields.keys() == set(algorithm.prepared)
    for field in algorithm.prepared:
        assert ready.fields[field].dtype == torch.float32
        assert ready.fields[field].shape == batch.mask.shape
        assert not ready.fields[field][~batch.mask].any()
    metrics = algorithm.batch_metrics(ready)
    assert metrics["response_length/max"] == float(batch.response_lengths.max())
    assert metrics.get("reward/abstained") == (1 if algorithm.context.graph.reward_fields else None)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_token_weights_of_a_mini_batch_sum_to_one_for_every_trained_role(name: str, folder: Path) -> None:
    spec = spec_of(folder, name)
    algorithm, batch = build_algorithm(spec, CPU), make_batch(name, abstained=(1,))
    weights = algorithm.token_weights(batch, [0, 1, 2, 3])
    assert tuple(weights) == graph_of(spec).trained == tuple(algorithm.objectives())
    for weight in weights.values():
        assert float(weight.sum()) == pytest.approx(1)
        assert not weight[4:].any()
        assert not weight[1].any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_an_algorithm_remembers_goes_on_after_a_checkpoint(name: str, folder: Path) -> None:
    spec = spec_of(folder, name)
    first, second = build_algorithm(spec, CPU), build_algorithm(spec, CPU)
    first.prepare(make_batch(name))
    first.finish_iteration({"actor/kl": 3.0})
    second.restore(first.state())
    assert second.state() == first.state()
    batches = [item.prepare(make_batch(name)) for item in (first, second)]
    for field in first.prepared:
        assert torch.equal(*(batch.fields[field] for batch in batches))
