"""A real job whose tail consolidates, in any way, ends with the bits of one without fusion, also after kills."""

import json
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

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


OUTCOME = ("iteration", "reward", "tokens", "kl", "kl_per_token", "response_tokens_max", "samples/truncated")
"""Results of an iteration that are independent of the worker."""


def settings(mode: str, *others: str) -> tuple[str, ...]:
    modes = (f"fusion.interStage.mode={mode}", "fusion.intraStage.mode=Disabled")
    return (*modes, f"generation.maxBatchSize={SLOTS}", *others)


def fixed(transfer: str, replicas: int) -> tuple[str, ...]:
    fusion = (f"threshold={THRESHOLD}", "pool=1", f"transfer={transfer}")
    return settings("Fixed", *(f"fusion.interStage.{each}" for each in fusion), f"inference.replicas={replicas}")


def assert_same(run: Ended, other: Ended) -> None:
    assert_same_weights(run, other)
    assert run.reported(*OUTCOME) == other.reported(*OUTCOME)


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Return the manifest and the run of the job without fusion, with a separate scoring worker."""
    folder = tmp_path_factory.mktemp("fusion")
    manifest = write_job(folder, iterations=ITERATIONS, batch=BATCH, responses=TOKENS, learning_rate=LEARNING_RATE)
    return manifest, run_job(manifest, folder / "off", settings=settings("Disabled"))


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("transfer", "replicas"), [("KV", 0), ("Tokens", 1)])
def test_a_gathered_tail_changes_no_bit(off: tuple[Path, Ended], tmp_path: Path, transfer: str, replicas: int) -> None:
    manifest, without = off
    fused = run_job(manifest, tmp_path / "run", settings=fixed(transfer, replicas))
    assert_same(fused, without)
    for line in fused.lines:
        if transfer == "KV":  # samples that could not move with their cache stayed first, which is counted
            assert line["fusion/moved_tokens"] <= line["fusion/stayed"], str(fused)
        else:
            assert line["fusion/moved_kv"] == line["fusion/stayed"] == 0
    assert fused.total("fusion/moved_kv" if transfer == "KV" else "fusion/moved_tokens") > 0
    assert ('"name":"migrate"' in fused.read("timeline.json")) == (transfer == "KV")


@pytest.mark.full
def test_scoring_by_generation_workers_without_fusion_and_auto_change_no_bit(
    off: tuple[Path, Ended], tmp_path: Path
) -> None:
    manifest, without = off
    for mode in ("Disabled", "Auto"):
        run = run_job(manifest, tmp_path / mode, settings=settings(mode, "inference.replicas=0"))
        assert_same(run, without)
    events = [json.loads(line) for line in run.read("events.jsonl").splitlines()]
    assert {"fusion-costs", "fusion-choice"} <= {event["kind"] for event in events}


@pytest.mark.full
def test_sources_destinations_and_coordinators_killed_when_the_tail_gathers_change_no_bit(
    off: tuple[Path, Ended], tmp_path: Path
) -> None:
    manifest, without = off
    victims = ("generation-0", "generation-1", "coordinator")
    kills = Kills(SEED, len(victims), victims, first=victims, at_event="pool-formed")
    assert_same(run_job(manifest, tmp_path / "run", settings=fixed("KV", 0), kills=kills), without)
