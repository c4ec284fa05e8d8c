"""A tenant that posts everything the API server accepts does not harm the jobs beside it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster
from tests.cluster.faults.hostile import Hostile, Post
from tests.cluster.faults.hostile_run import HEALTHY, LEAST_POSTS, TenantOutcome, run
from tests.cluster.fixture import NO_ROOT
from tests.cluster.jobs_in_pods.undisturbed import Undisturbed

pytestmark = pytest.mark.full

SEED = 11
MINUTES = 1.25
ITERATIONS = 6
ROOT = Path(__file__).parents[3]


def test_a_seed_posts_the_same_objects_and_every_kind_of_them() -> None:
    def posts(seed: int) -> list[Post]:
        job: dict[str, Any] = {"spec": {"training": {}, "models": {}}, "metadata": {}}
        moves = Hostile(seed, "n", job, [("tiny", "u")], "image").moves()
        return [post for move in itertools.islice(moves, 200) for post in move]

    assert posts(1) == posts(1) != posts(2)
    kinds = {post.kind for post in posts(1)}
    assert kinds == {"Pod", "RLHFJob", "ConfigMap", "Secret", "Service", "NetworkPolicy"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Yield a separate cluster with a real node."""
    if os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    with Cluster(level="node", images=[images.mounted(Path(environment.PYTHON).parent), images.python()]) as running:
        running.define(ROOT / "crds" / "rlhfjobs.yaml")
        yield running


def test_healthy_jobs_and_objects_of_others_are_as_if_the_tenant_were_not_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    with Undisturbed(tmp_path / "undisturbed", iterations=ITERATIONS) as undisturbed:
        outcome = TenantOutcome(SEED)
        run(cluster, tmp_path, ITERATIONS, outcome, minutes=MINUTES)
        assert outcome.weights == [undisturbed.weights()] * HEALTHY
    assert outcome.operators == 1, "the operator never restarted"
    assert outcome.healthy
    assert outcome.bugs == 0
    assert outcome.changed == []
    assert outcome.flat, outcome.memory
    assert sum(outcome.posted.values()) > LEAST_POSTS, outcome.posted
