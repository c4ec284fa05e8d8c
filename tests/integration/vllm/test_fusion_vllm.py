"""Inter-stage fusion with real vLLM workers, and with workers of two engines.

A pool forms, samples move to it with their caches or by their tokens, released workers score, and every token is that
of a job without fusion.
"""

import json
import math
from pathlib import Path

import pytest
from tests.support.jobs import mixed_engines
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import edited_spec, write_job
from tests.support.model_folders import models

from rlhf_common.arrays import unpack
from rlhf_coordinator.reports.trackers.timeline_json import read_spans
from rlhf_coordinator.storage.journal import unframe

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 10
"""Number of iterations; a job starts with the first available worker, and the second one comes seconds later."""
TOKENS = 300
"""Tokens of a response; enough that a tail remains, because lengths come from the policy's own end of sequence."""
SEED = 5
ROOT = Path(__file__).resolve().parents[3]
BATCH = 32
THRESHOLD = 16
"""Number of unfinished samples of BATCH at which the tail consolidates; most have not ended by then."""


def write(folder: Path) -> Path:
    """Write a job of vLLM workers, which score their own samples.

    Its steps change weights only by rounding: the test compares tokens, and sums in another order must move none of
    them.
    """
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, responses=TOKENS, batch=BATCH)
    models.write_policy(folder / "policy", "llama", head_dim=32)
    with edited_spec(manifest) as spec:
        spec["deterministic"] = False
        spec["generation"]["engine"] = "vllm"
        spec["generation"]["maxBatchSize"] = 12
        spec["inference"]["replicas"] = 0
        spec["training"]["optimizer"]["learningRate"] = 1e-9
    return manifest


def gathered(transfer: str) -> tuple[str, ...]:
    """Return settings that gather the tail on one worker."""
    fusion = f"{{mode: Fixed, threshold: {THRESHOLD}, pool: 1, transfer: {transfer}}}"
    return f"fusion.interStage={fusion}", "fusion.intraStage.mode=Disabled"


def tokens_of(run_dir: Path) -> dict[tuple[int, int], list[int]]:
    """Return (iteration, sample) -> tokens, of the iterations whose journal is stored."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in sorted(run_dir.rglob("iteration-*.log")):
        for record, _ in unframe(path.read_bytes()):
            if record.WhichOneof("record") == "finished":
                key = record.finished.key
                found[key.iteration, key.sample] = unpack(record.finished.tokens).tolist()
    return found


def assert_same(run: Ended, off: Ended) -> None:
    """Assert that a run has the same results as the one without fusion, as far as they depend on tokens alone."""
    names = ("iteration", "reward", "tokens", "response_tokens_max", "samples/truncated")
    assert run.reported(*names) == off.reported(*names), str(run)
    undisturbed, tokens = tokens_of(off.run_dir), tokens_of(run.run_dir)
    assert tokens
    assert tokens == undisturbed, str(run)


def rebuilt(run_dir: Path) -> float:
    """Return the tokens that were computed again at a sample's destination."""
    lines = (run_dir / "timeline.json").read_text().splitlines()
    rows = [json.loads(line.rstrip(",")).get("args", {}) for line in lines if line.startswith("{")]
    return math.fsum(
        float(found["rebuild_tokens"]) * float(found["rebuild_rows"]) * float(found["rebuild_passes"])
        for found in rows
        if "rebuild_tokens" in found
    )


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Return the manifest and the run of the job without fusion."""
    folder = tmp_path_factory.mktemp("fusion")
    manifest = write(folder)
    settings = ("fusion.interStage.mode=Disabled", "fusion.intraStage.mode=Disabled")
    return manifest, run_job(manifest, folder / "off", settings=settings)


def test_a_gathered_tail_of_vllm_workers_changes_no_token_and_released_workers_score(
    off: tuple[Path, Ended], tmp_path: Path
) -> None:
    run = run_job(off[0], tmp_path / "run", settings=gathered("KV"))
    assert_same(run, off[1])
    kinds = [json.loads(line)["kind"] for line in run.read("events.jsonl").splitlines()]
    assert "pool-formed" in kinds, str(run)
    assert run.total("fusion/moved_kv") > 0, str(run)
    assert rebuilt(tmp_path / "run") == 0, "a moved cache is not computed again"
    scored = {span.worker for span in read_spans(tmp_path / "run" / "timeline.json") if span.name.startswith("score")}
    assert len([worker for worker in scored if worker.startswith("generation")]) == 2, scored


def test_sources_destinations_and_coordinators_killed_when_the_tail_gathers_change_no_token(
    off: tuple[Path, Ended], tmp_path: Path
) -> None:
    victims = ("generation-0", "generation-1", "coordinator")
    kills = Kills(SEED, len(victims), victims, first=victims, at_event="pool-formed")
    run = run_job(off[0], tmp_path / "run", settings=gathered("KV"), kills=kills)
    assert_same(run, off[1])


def test_workers_of_two_engines_exchange_samples_by_their_tokens(
    off: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(mixed_engines.MEETING, str(tmp_path))
    settings = (*gathered("Auto"), "generation.engine=tests.support.jobs.mixed_engines")
    run = run_job(off[0], tmp_path / "run", settings=settings)
    assert_same(run, off[1])
    assert run.total("fusion/moved_kv") == 0
    assert run.total("fusion/moved_tokens") > 0, str(run)
    assert rebuilt(tmp_path / "run") > 0, "known tokens go through the other engine"
