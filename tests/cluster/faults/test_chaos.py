"""Chaos on a real cluster: despite faults of its pods and the control plane, a job trains to the same weights or
rewards.

Rule: the cluster is the test's own, because its components are stopped and killed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster
from tests.cluster.faults.chaos import OF_AN_ENGINE, VICTIMS, WEIGHTS, Fault, Kind, due, faults
from tests.cluster.faults.chaos_run import ChaosOutcome, iterations, run, run_faults
from tests.cluster.fixture import NO_ROOT
from tests.cluster.jobs_in_pods.quickstart_job import install, rewards
from tests.cluster.jobs_in_pods.undisturbed import Undisturbed

pytestmark = pytest.mark.full

SEED = 5
COUNT = len(WEIGHTS)
"""Number of faults; every kind with a weight comes once."""
ROOT = Path(__file__).parents[3]


def test_a_seed_gives_the_same_faults_and_a_longer_list_begins_with_the_shorter() -> None:
    assert faults(SEED, 40)[:12] == faults(SEED, 12)
    assert faults(SEED, 12) != faults(SEED + 1, 12)


def test_every_kind_comes_once_before_any_comes_again() -> None:
    for seed in range(20):
        assert {fault.kind for fault in faults(seed, COUNT)} == set(WEIGHTS)
        assert len({fault.kind for fault in faults(seed, 10)}) == 10


def test_later_faults_come_by_their_weights_and_spare_no_victim() -> None:
    result = faults(1, 3000)
    counts = Counter(item.kind for item in result)
    assert counts[Kind.KILL] > 3 * counts[Kind.ETCD]
    assert set(WEIGHTS) | {fault.kind for fault in OF_AN_ENGINE} == set(Kind)
    for kind in WEIGHTS:
        assert {item.victim for item in result if item.kind is kind} == set(VICTIMS[kind])
    assert all((item.seconds > 0) == (item.kind is Kind.CUT) for item in result)


def test_only_killed_containers_are_failures() -> None:
    kinds = (Kind.DELETE, Kind.KILL, Kind.EVICT, Kind.FORCE, Kind.SUSPEND, Kind.CUT, Kind.OPERATOR)
    wanted = due(Fault(kind, "", 0.0) for kind in kinds)
    assert wanted.met(1, 2)
    assert wanted.met(1, 3)
    assert not wanted.met(1, 4)
    assert not wanted.met(2, 2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Yield a separate cluster with a real node."""
    if os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    with Cluster(level="node", images=[images.mounted(Path(environment.PYTHON).parent)]) as running:
        running.define(ROOT / "crds" / "rlhfjobs.yaml")
        yield running


def test_a_job_trains_to_the_same_weights_whatever_happens_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with Undisturbed(tmp_path / "undisturbed", iterations=iterations(faults(SEED, COUNT))) as undisturbed:
        outcome = ChaosOutcome(SEED)
        run(cluster, images.MOUNTED, tmp_path / "chaos", COUNT, outcome)
        assert set(outcome.kinds) == set(WEIGHTS)
        assert outcome.counted, outcome
        assert outcome.left == []
        assert outcome.bugs == 0
        assert outcome.weights == undisturbed.weights() != ""


@pytest.fixture
def release() -> Iterator[Cluster]:
    """Yield a separate cluster with a real node and the installed chart."""
    if os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    archives = [images.mounted(Path(environment.PYTHON).parent), images.operator()]
    with Cluster(level="node", images=archives) as running:
        install(running, coordinator=images.MOUNTED)
        yield running


def test_a_job_of_the_chart_that_decodes_by_vllm_earns_the_same_rewards_though_its_engine_and_its_coordinator_are_lost(
    release: Cluster, tmp_path: Path
) -> None:
    """Compare rewards rather than weights, because on a CPU the last bits of vLLM's numbers depend on the batch.

    The difference shrinks with the step size. A reward is a share of the characters of a response.
    """
    more: dict[str, Any] = {"engine": "vllm", "responses": 12, "learning_rate": 1e-5}
    iterating = iterations(OF_AN_ENGINE)
    with Undisturbed(tmp_path / "undisturbed", iterations=iterating, **more) as undisturbed:
        outcome = ChaosOutcome(SEED)
        run_faults(release, images.MOUNTED, tmp_path / "chaos", OF_AN_ENGINE, outcome, installed=True, **more)
        assert outcome.counted, outcome
        assert outcome.left == []
        assert outcome.bugs == 0
        earned = rewards(tmp_path / "chaos" / "checkpoints" / "run" / "metrics.jsonl")
        assert len(earned) == iterating
        assert earned == rewards(undisturbed.finished() / "metrics.jsonl")
