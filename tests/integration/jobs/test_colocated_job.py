"""A real job whose training ranks are in its generation workers ends with the bits of one with separate ranks.

One worker lends new weights in memory, the other streams them.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 4
VICTIMS = ("generation-0", "generation-1")
PHASES = ("Generating", "Training")
SEED = 9
APART = (
    "spec.fusion.interStage.mode=Disabled",
    "spec.fusion.intraStage.mode=Disabled",
    "spec.training.weightSharing=Disabled",
)
TOGETHER = ("spec.placement=Colocated", "spec.inference.replicas=0", "spec.fusion.intraStage.mode=Disabled")


def options(changes: tuple[str, ...]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def said(*runs: Ended) -> str:
    return "\n".join(f"kills {run.kills}\n{run.output[-3000:]}" for run in runs)


def outcome(run_dir: Path) -> list[dict[str, float]]:
    names = ("iteration", "reward", "tokens", "kl", "kl_per_token")
    return [{name: line[name] for name in names} for line in read_metrics(run_dir / "metrics.jsonl")]


def test_ranks_in_generation_workers_change_no_bit_though_one_is_killed_decoding_and_one_training(
    tmp_path: Path,
) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS, responses=60)
    dedicated = run_job(manifest, tmp_path / "dedicated", options=options(APART))
    kills = Kills(SEED, len(VICTIMS), VICTIMS, first=VICTIMS, iterations_between=1, in_phases=PHASES)
    colocated = run_job(manifest, tmp_path / "colocated", options=options(TOGETHER), kills=kills)
    assert (dedicated.code, colocated.code) == (0, 0), said(dedicated, colocated)
    assert len(colocated.kills) == len(VICTIMS), said(colocated)
    assert colocated.weights == dedicated.weights != "", said(colocated)
    assert outcome(tmp_path / "colocated") == outcome(tmp_path / "dedicated")
    logs = {path.stem for path in (tmp_path / "colocated" / "logs").glob("*.log")}
    assert logs - {"fork-server"} == {"coordinator", "generation-0", "generation-1"}
    timeline = (tmp_path / "colocated" / "timeline.json").read_text()
    for span in ("offload/generation", "offload/inference", "offload/training", "onload/training", "onload/generation"):
        assert f'"name":"{span}"' in timeline
    assert '"way":"host_memory"' in timeline, "weights are lent, and those that were streamed are the same"
    assert '"way":"stream"' in (tmp_path / "dedicated" / "timeline.json").read_text()
    assert all(line["seconds/turns"] > 0 for line in read_metrics(tmp_path / "colocated" / "metrics.jsonl"))
