"""costs.json of a run appears once all training ranks have reported, and an invalid report is refused."""

import json
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.training import measured_costs
from rlhf_planner.plan_search.cost_document import COSTS_FILE, CostDocumentError


def report(rank: int, document: str) -> pb.Observation:
    costs = pb.TrainingCostsObservation(rank=rank, world_size=2, document=document)
    return pb.Observation(end_ns=1, training_costs=costs)


def layers(role: str, seconds: float) -> str:
    times = [{"tokens": 8, "seconds": seconds}]
    return json.dumps({"layers": [{"role": role, "source": "measured", "times": times}]})


@pytest.fixture
def run(tmp_path: Path) -> JobRun:
    return begin_in_process(tmp_path, make_job(tmp_path, training={"parallelism": {"pipeline": 2}}))[0]


def test_the_file_has_the_figures_of_all_ranks(run: JobRun) -> None:
    path = run.journal.folder.parent / COSTS_FILE
    measured_costs.observe(run, pb.Observation(end_ns=1, offload=pb.OffloadObservation(role="training")))
    measured_costs.observe(run, report(1, layers("critic", 2.0)))
    assert not path.exists()
    measured_costs.observe(run, report(0, layers("actor", 1.0)))
    found = {layer["role"]: layer["times"][0]["seconds"] for layer in json.loads(path.read_bytes())["layers"]}
    assert found == {"actor": 1.0, "critic": 2.0}
    assert not run.state.rank_costs


@pytest.mark.parametrize(
    ("rank", "document", "words"),
    [
        (2, "{}", "training_costs.rank is 2, the job has 2 ranks"),
        (0, "{", "Invalid JSON"),
        (0, '{"flops": {"value": -1, "source": "measured"}}', "flops.value"),
    ],
)
def test_an_impossible_report_is_refused(run: JobRun, rank: int, document: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measured_costs.observe(run, report(rank, document))
    assert issubclass(CostDocumentError, ValueError), "the session of the sender ends"
