"""A real job whose critic trains beside the next decoding has the same weights and reports despite kills."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job, trained
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.timeline_json import read_spans

pytestmark = pytest.mark.full

ITERATIONS = 6
EVERY = 4
"""Iterations from one checkpoint to the next, after which all is trained at once."""
VICTIMS = ("coordinator", "training-1", "generation-0")
OF_TRAINING = tuple(f"training/{part}/" for part in ("actor", "critic", "gradient_norm", "learning_rate", "train"))
SAME = ("reward", "tokens_cut", "response_tokens_", "kl", *OF_TRAINING)
TIMES = ("seconds", "time_ns")


def reports(run: Ended) -> list[dict[str, float]]:
    """Return the reports of every iteration that must be equal."""
    return [
        {name: value for name, value in line.items() if name.startswith(SAME) and not name.endswith(TIMES)}
        for line in run.lines
    ]


@pytest.mark.timeout(1800)
def test_critics_that_train_beside_decoding_change_nothing_whoever_dies_meanwhile(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)

    def run(name: str, overlap: str, kills: Kills | None = None) -> Ended:
        checkpoints = (f"checkpoints.path={tmp_path / name / 'checkpoints'}", f"checkpoints.every={EVERY}")
        settings = (*checkpoints, f"training.criticOverlap={overlap}")
        return run_job(manifest, tmp_path / name, settings=settings, kills=kills)

    off, undisturbed = run("off", "Disabled"), run("on", "Enabled")
    killed = run("killed", "Enabled", Kills(3, len(VICTIMS), VICTIMS, first=VICTIMS, at_event="critics-behind"))
    chosen = run("auto", "Auto", Kills(3, 1, VICTIMS, first=VICTIMS[:1], at_event="critics-behind"))
    for ended in (undisturbed, killed, chosen):
        assert trained(ended.run_dir) == trained(off.run_dir), ended.kills
        assert reports(ended) == reports(off), ended.kills
    assert [line["critic_overlap/on"] for line in chosen.lines][:3] == [0, 0, 1], "the third one is a probe"

    beside = ["training/critic_overlap_seconds" in line for line in undisturbed.lines]
    assert beside == [(number + 1) % EVERY != 0 and number + 1 < ITERATIONS for number in range(ITERATIONS)]
    spans = list(read_spans(tmp_path / "on" / "timeline.json"))
    for number in (place for place, apart in enumerate(beside) if apart):
        generating = min(s.start for s in spans if s.name == "Generating" and s.iteration == number + 1)
        critic = min(s.start for s in spans if s.name == "train/critic/F" and s.iteration == number)
        assert generating < critic, "the next iteration has begun before critics train"
