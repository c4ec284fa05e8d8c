"""Neighbouring versions work together; other versions get an error that names the image to change.

Readers accept messages of newer writers.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api import manifest, protocol
from rlhf_api.problems import ManifestError
from rlhf_api.protocol import PROTOCOL, mismatch
from rlhf_common import control_pb2 as pb
from rlhf_common import worker_roles
from rlhf_common.schedule import ScheduleTable

PPO = (Path(__file__).parents[3] / "examples/ppo.yaml").read_text()


@given(st.integers(0, 100), st.integers(0, 100))
def test_neighbours_work_together_and_others_do_not(worker: int, coordinator: int) -> None:
    assert (mismatch("generation-0", worker, coordinator) == "") == (abs(worker - coordinator) < 2)


def test_who_is_too_old_is_the_image_to_change() -> None:
    old = mismatch("generation-0", PROTOCOL, PROTOCOL + 2)
    assert f"generation-0 speaks version {PROTOCOL} of the protocol and the coordinator version {PROTOCOL + 2}" in old
    assert "the worker image is too old" in old
    new = mismatch("generation-0", PROTOCOL + 2, PROTOCOL)
    assert "the coordinator image is too old: suspend and resume the job" in new


def test_a_resolved_job_of_a_newer_version_is_read_and_a_users_is_not() -> None:
    document = manifest.dump(job := manifest.parse(PPO))
    document["spec"]["newBlock"] = {"mode": "Auto"}
    document["spec"]["rollout"]["newField"] = 3
    document["spec"]["algorithm"]["ppo"]["newField"] = None
    assert protocol.read_job(document) == job
    with pytest.raises(ManifestError, match="newField") as refused:
        manifest.parse(json.dumps(document))
    assert {problem.field for problem in refused.value.problems} >= {"spec.newBlock", "spec.rollout.newField"}


def test_a_schedule_of_a_newer_coordinator_is_read() -> None:
    action = {"kind": "F", "pipeline": 0, "stage": 0, "microbatch": 0, "newField": 1}
    pipeline = {"name": "actor", "model": "actor", "stage_ranks": [0], "microbatches": 1, "newField": 1}
    table = {"method": "serial-1f1b", "pipelines": [pipeline], "rows": [[action]], "newField": 1}
    assert ScheduleTable.model_validate_json(json.dumps(table)).rows[0][0].kind == "F"


def test_roles_of_a_worker_are_read_as_they_were_written_and_an_unknown_one_is_refused() -> None:
    state = pb.WorkerState()
    worker_roles.write_roles(state, ["inference", "generation"])
    assert list(state.roles) == [pb.WORKER_ROLE_GENERATION, pb.WORKER_ROLE_INFERENCE]
    assert worker_roles.roles_of(state) == {"generation", "inference"}
    assert worker_roles.roles_of(pb.WorkerState()) == frozenset()
    for unknown in (pb.WorkerState(roles=[99]), pb.WorkerState(roles=[0])):  # type: ignore[list-item] # a number of another version
        with pytest.raises(ValueError, match="must be of generation, inference, training"):
            worker_roles.roles_of(unknown)
