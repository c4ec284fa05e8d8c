"""A real job whose tail consolidates, in any way, ends with the bits of one without fusion, also after kills."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = pytest.mark.timeout(1800)

ITERATIONS = 3
TOKENS = 300
"""Tokens of a response; enough that a tail remains, because lengths come from the policy's own end of sequence."""
BATCH, SLOTS = 32, 16
"""Samples of an iteration, and slots of each of two workers."""
THRESHOLD = 16
"""Number of unfinished samples at which the tail gathers, so that one worker has room for all. About eight would move,
and some do, although many end before the hand-over on a machine that decodes fast.
"""
LEARNING_RATE = 1e-4
"""Learning rate at which the policy changes but does not learn to end at once."""
SEED = 6


def options(mode: str, **others: object) -> list[str]:
    values: dict[str, object] = {"spec.fusion.interStage.mode": mode, "spec.fusion.intraStage.mode": "Disabled"}
    values |= {"spec.generation.maxBatchSize": SLOTS, **others}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def fixed(transfer: str, replicas: int) -> list[str]:
    settings = {"threshold": THRESHOLD, "pool": 1, "transfer": transfer}
    fields = {f"spec.fusion.interStage.{name}": value for name, value in settings.items()}
    return options("Fixed", **fields, **{"spec.inference.replicas": replicas})


def said(*runs: Ended) -> str:
    return "\n".join(f"kills {run.kills}\n{run.output[-3000:]}" for run in runs)


def outcome(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of every iteration, independent of the worker."""
    names = ("iteration", "reward", "tokens", "kl", "kl_per_token", "response_tokens_max", "samples/truncated")
    return [{name: line.get(name) for name in names} for line in read_metrics(run_dir / "metrics.jsonl")]


def total(run_dir: Path, name: str) -> float:
    return math.fsum(line[name] for line in read_metrics(run_dir / "metrics.jsonl"))


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ended]:
    """Return (manifest, run folder, how it ended) of the job without fusion, with a separate scoring worker."""
    folder = tmp_path_factory.mktemp("fusion")
    manifest = write_job(folder, iterations=ITERATIONS, batch=BATCH, responses=TOKENS, learning_rate=LEARNING_RATE)
    return manifest, folder / "off", run_job(manifest, folder / "off", options=options("Disabled"))


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("transfer", "replicas"), [("KV", 0), ("Tokens", 1)])
def test_a_gathered_tail_changes_no_bit(
    off: tuple[Path, Path, Ended], tmp_path: Path, transfer: str, replicas: int
) -> None:
    manifest, folder, without = off
    fused = run_job(manifest, tmp_path / "run", options=fixed(transfer, replicas))
    assert (without.code, fused.code) == (0, 0), said(without, fused)
    assert fused.weights == without.weights != "", said(fused)
    assert outcome(tmp_path / "run") == outcome(folder)
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if transfer == "KV":  # samples that could not move with their cache stayed first, which is counted
            assert line["fusion/moved_tokens"] <= line["fusion/stayed"], said(fused)
        else:
            assert line["fusion/moved_kv"] == line["fusion/stayed"] == 0
    assert total(tmp_path / "run", "fusion/moved_kv" if transfer == "KV" else "fusion/moved_tokens") > 0
    timeline = (tmp_path / "run" / "timeline.json").read_text()
    assert ('"name":"migrate"' in timeline) == (transfer == "KV")


@pytest.mark.full
def test_scoring_by_generation_workers_without_fusion_and_auto_change_no_bit(
    off: tuple[Path, Path, Ended], tmp_path: Path
) -> None:
    manifest, folder, without = off
    for mode in ("Disabled", "Auto"):
        run = run_job(manifest, tmp_path / mode, options=options(mode, **{"spec.inference.replicas": 0}))
        assert (without.code, run.code) == (0, 0), said(without, run)
        assert run.weights == without.weights != "", said(run)
        assert outcome(tmp_path / mode) == outcome(folder)
    events = [json.loads(line) for line in (tmp_path / "Auto" / "events.jsonl").read_text().splitlines()]
    assert {"fusion-costs", "fusion-choice"} <= {event["kind"] for event in events}


@pytest.mark.full
def test_sources_destinations_and_coordinators_killed_when_the_tail_gathers_change_no_bit(
    off: tuple[Path, Path, Ended], tmp_path: Path
) -> None:
    manifest, folder, without = off
    victims = ("generation-0", "generation-1", "coordinator")
    kills = Kills(SEED, len(victims), victims, first=victims, at_event="pool-formed")
    killed = run_job(manifest, tmp_path / "run", options=fixed("KV", 0), kills=kills)
    assert (without.code, killed.code) == (0, 0), said(without, killed)
    assert len(killed.kills) == len(victims), said(killed)
    assert killed.weights == without.weights != "", said(killed)
    assert outcome(tmp_path / "run") == outcome(folder)
