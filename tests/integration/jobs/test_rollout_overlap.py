"""A real job whose iterations decode while the previous one is trained on: the same weights despite kills."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job, trained
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.timeline_json import read_spans

pytestmark = pytest.mark.full

ITERATIONS = 7
EVERY = 5
"""Iterations from one checkpoint to the next, before which nothing is trained beside decoding."""
BESIDE = [True, True, True, True, False, True, False]
"""Whether each iteration is trained on while the next one decodes."""
VICTIMS = ("coordinator", "training-1", "generation-0", "inference-0")
SAME = ("reward", "staleness/", "response_tokens_", "kl", "training/actor/", "training/critic/", "training/gradient")


def reports(run: Ended) -> list[dict[str, float]]:
    """Return the reports of every iteration that must be equal."""
    return [
        {name: value for name, value in line.items() if name.startswith(SAME) and "seconds" not in name}
        for line in run.lines
    ]


@pytest.mark.timeout(900)
def test_iterations_decode_beside_training_by_weights_one_version_older_whoever_dies_meanwhile(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)

    def run(name: str, kills: Kills | None = None) -> Ended:
        checkpoints = (f"checkpoints.path={tmp_path / name / 'checkpoints'}", f"checkpoints.every={EVERY}")
        settings = (*checkpoints, "rollout.overlapTraining=Enabled", "fusion.intraStage.mode=Disabled")
        return run_job(manifest, tmp_path / name, settings=settings, kills=kills)

    undisturbed = run("undisturbed")
    killed = run("killed", Kills(3, len(VICTIMS), VICTIMS, first=VICTIMS, at_event="training-behind"))
    assert trained(killed.run_dir) == trained(undisturbed.run_dir) != {}, killed.kills
    assert reports(killed) == reports(undisturbed), killed.kills

    said = undisturbed.lines
    assert [line["staleness/max"] for line in said] == [0.0, *map(float, BESIDE[:-1])]
    assert [line["staleness/mean"] for line in said] == [line["staleness/max"] for line in said]
    assert ["rollout/overlap_seconds" in line for line in said] == BESIDE
    spans = list(read_spans(tmp_path / "undisturbed" / "timeline.json"))
    for number in (place for place, apart in enumerate(BESIDE) if apart):
        generating = min(s.start for s in spans if s.name == "Generating" and s.iteration == number + 1)
        ends = max(s.start + s.seconds for s in spans if s.name == "train/actor/F" and s.iteration == number)
        assert generating < ends, "the next iteration has begun before training ends"
