"""A real job that scores unfinished samples early ends with the bits of one that does not, also if a worker dies."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 3
TOKENS = 300
"""Tokens of a response; several blocks in most cases."""
SAME = ("iteration", "reward", "tokens", "kl", "kl_per_token", "response_tokens_max", "samples/truncated")


def options(incremental: str) -> list[str]:
    values = {
        "fusion.interStage.mode": "Disabled",
        "fusion.intraStage.mode": "Disabled",
        "inference.incremental": incremental,
    }
    return [word for name, value in values.items() for word in ("--set", f"spec.{name}={value}")]


def test_prefixes_and_the_death_of_who_holds_them_change_no_bit(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS, responses=TOKENS)
    victims = ("inference-0",) * 2
    # When the last response arrives its scorer has prefixes; only two of the three iterations have a kill.
    kills = Kills(7, len(victims), victims[:1], first=victims, in_phases=("Scoring",) * len(victims))
    off = run_job(manifest, tmp_path / "off", options=options("Disabled"))
    killed = run_job(manifest, tmp_path / "on", options=options("Enabled"), kills=kills)
    said = f"{killed.kills}\n{off.output[-3000:]}\n{killed.output[-3000:]}"
    assert (off.code, killed.code) == (0, 0), said
    assert len(killed.kills) == len(victims), said
    assert killed.weights == off.weights != "", said
    with_prefixes, without = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("on", "off"))
    for line, other in zip(with_prefixes, without, strict=True):
        assert {name: line.get(name) for name in SAME} == {name: other.get(name) for name in SAME}
    assert all(line["incremental/on"] == 1 for line in with_prefixes)
    assert any(line["incremental/early_share"] > 0 for line in with_prefixes), with_prefixes
    assert not any("incremental/on" in line for line in without)
    timeline = [(tmp_path / name / "timeline.json").read_text() for name in ("on", "off")]
    assert ["score-prefix/reference" in text for text in timeline] == [True, False]
