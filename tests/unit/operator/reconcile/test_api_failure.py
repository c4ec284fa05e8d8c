"""Messages about a failing API server: in every phase, of bounded length, and only while it fails."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.api_failure import LEAD, TAIL, describe_failure
from rlhf_operator.reconcile.conditions import MESSAGE_MAX


@settings(max_examples=20)
@given(st.lists(st.text(max_size=3000), min_size=1, max_size=3))
def test_any_words_stand_first_once_and_go_when_the_api_server_does_what_is_asked(words: list[str]) -> None:
    cluster = SimulatedCluster().begin()
    before = cluster.running_message
    for each in words:
        cluster.later(60)
        cluster.read()
        cluster.api_failure = describe_failure(each, "team")
        cluster.settle()
        message = cluster.running_message
        assert message.startswith(LEAD)
        assert message.endswith(f"{TAIL}. {before}")
        assert len(message) <= MESSAGE_MAX
        assert "\n" not in message
    cluster.api_failure = ""
    cluster.settle()
    assert cluster.running_message == before


@pytest.mark.parametrize(
    ("spec", "ended"), [({"suspend": True}, None), ({"generation": {"replicas": 0}}, None), ({}, 0), ({}, 21)]
)
def test_the_words_come_and_go_in_every_phase(spec: dict[str, Any], ended: int | None) -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"] |= spec
    if ended is not None:
        cluster.end("coordinator", ended)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    cluster.later(60)
    cluster.settle()
    before = cluster.running_message
    cluster.api_failure = describe_failure("500 etcd has no leader", "team")
    cluster.settle()
    assert cluster.running_message == f"{LEAD}500 etcd has no leader): {TAIL}. {before}"
    cluster.api_failure = ""
    cluster.settle()
    assert cluster.running_message == before
