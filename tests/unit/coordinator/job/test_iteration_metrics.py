"""KL has one unit: the job's KL per response is the value that the trainer compares with klTarget, to the last
digit."""

import math
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training.training_ranks import PPO_FIELDS, make_samples

from rlhf_api.algorithms import full_graph
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import Group
from rlhf_common.samples import NOT_SAMPLED, VersionSpan
from rlhf_coordinator.job.iteration_metrics import batch_metrics, finite_metrics, idle_share
from rlhf_coordinator.job.iteration_times import IterationTimes
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_workers.algorithms.batch_metrics import batch_metrics as trained_metrics
from rlhf_workers.training.batches.training_batch import batch_from

GRAPH = full_graph("ppo")


def ledger_of(samples: Any) -> Any:
    def stored(sample: Any) -> Any:
        fields = {name: unpack(value).tobytes() for name, value in sample.fields.items()}
        response = np.asarray(unpack(sample.response))
        return SimpleNamespace(
            fields=fields,
            response=Response(response, fields["log_probabilities"]),
            abstained=sample.abstained,
            reward_metrics={},
            failed=False,
            finish_reason="stop",
        )

    stored_samples = [stored(sample) for sample in samples]
    tokens = sum(len(sample.response) for sample in stored_samples)
    return SimpleNamespace(
        samples=stored_samples, uncut_samples=stored_samples, trainable=stored_samples, tokens=tokens
    )


class Response:
    """Tokens with the log-probabilities with which they were sampled."""

    def __init__(self, tokens: np.ndarray, log_probabilities: bytes) -> None:
        self.tokens, self.log_probabilities = tokens, log_probabilities

    def __len__(self) -> int:
        return len(self.tokens)


@pytest.mark.parametrize(("abstained", "written"), [((), 0), ((2, 5), 0), ((), 2)])
def test_kl_is_that_of_the_trainer_both_ways(abstained: tuple[int, ...], written: int) -> None:
    """`written`: tokens of an environment in each response, which the policy did not draw."""
    samples = make_samples(abstained=abstained)
    for sample in samples:
        drawn = np.array(unpack(sample.fields["log_probabilities"]))
        drawn[1 : 1 + written] = NOT_SAMPLED
        sample.fields["log_probabilities"].CopyFrom(pack(drawn))
    shown = batch_metrics(ledger_of(samples), GRAPH)
    trained = trained_metrics(batch_from(samples, len(samples), PPO_FIELDS, holes=written > 0), GRAPH)
    assert shown["kl"] == pytest.approx(trained["actor/kl"], rel=1e-9)
    assert shown["kl_per_token"] == pytest.approx(trained["actor/kl_per_token"], rel=1e-9)
    assert shown["kl"] != pytest.approx(shown["kl_per_token"], rel=0.5)


def test_a_worker_that_decodes_in_the_phase_in_progress_is_not_idle() -> None:
    times = IterationTimes(0.0, phase="Generating", phase_start=10.0, seconds={"Starting": 10.0})
    fusion = SimpleNamespace(busy={"generation-0": {"decode": 3.0}})
    run: Any = SimpleNamespace(times=times, state=SimpleNamespace(fusion=fusion))
    assert idle_share(run, "generation-0", 14.0) == pytest.approx(0.25)
    assert idle_share(run, "generation-1", 14.0) == 1.0
    assert idle_share(run, "generation-1", 10.0) == 0.0


def test_reward_and_cost_are_means_over_the_same_responses() -> None:
    graph = full_graph("safeRlhf")
    ledger = Ledger(0, 6, tuple(graph.tasks_of(Group.INFERENCE)), 1)
    reward, cost = (field for field in graph.reward_fields)
    judged = {0: (1.0, 10.0), 1: (3.0, 30.0), 2: (100.0, None), 3: (None, 500.0), 4: (None, None)}
    for index, values in judged.items():
        response = PackedResponse(bytes(4), bytes(4), (VersionSpan(0, 1),))
        ledger.finish(index, ledger.assign(index, "w"), "w", response, "stop", "")
        for field, value in zip((reward, cost), values, strict=True):
            if value is not None:
                ledger.samples[index].fields[str(field)] = struct.pack("<f", value)
    shown = batch_metrics(ledger, graph)
    assert (shown["reward"], shown["reward_std"], shown["reward_min"], shown["reward_max"]) == (2.0, 1.0, 1.0, 3.0)
    assert (shown["cost"], shown["cost_std"]) == (20.0, 10.0)


def test_rewards_and_costs_of_cut_responses_and_greedy_baselines_do_not_count() -> None:
    graph = full_graph("safeRlhf")
    scores = [{"reward": struct.pack("<f", value), "cost": struct.pack("<f", -value)} for value in (1.0, 3.0, 50.0)]
    response = Response(np.zeros(1, np.int32), bytes(4))
    samples = [
        SimpleNamespace(
            fields=fields, response=response, abstained=True, reward_metrics={}, failed=False, finish_reason="stop"
        )
        for fields in scores
    ]
    ledger: Any = SimpleNamespace(samples=samples, uncut_samples=samples[:2], trainable=samples[:2], tokens=2)
    shown = batch_metrics(ledger, graph)
    assert (shown["reward"], shown["cost"]) == (2.0, -2.0)


def test_a_batch_without_divergence_shows_none() -> None:
    samples = make_samples(abstained=range(8))
    assert not {"kl", "kl_per_token"} & batch_metrics(ledger_of(samples), GRAPH).keys()


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: not name.startswith("nonfinite/")), st.floats()))
def test_a_metric_that_is_not_finite_is_named_instead_of_dropped(metrics: dict[str, float]) -> None:
    shown = finite_metrics(metrics)
    assert all(math.isfinite(value) for value in shown.values())
    for name, value in metrics.items():
        assert (name in shown) == math.isfinite(value)
        assert shown.get(f"nonfinite/{name}") == (None if math.isfinite(value) else 1.0)
