"""Inter-stage fusion with real vLLM workers, and with workers of two engines.

A pool forms, samples move to it with their caches or by their tokens, released workers score, and every token is that
of a job without fusion.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import write_job
from tests.support.model_folders import models

from rlhf_common.arrays import unpack
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
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
    job = yaml.safe_load(manifest.read_text())
    spec = job["spec"]
    spec["deterministic"] = False
    spec["generation"]["engine"] = "vllm"
    spec["generation"]["maxBatchSize"] = 12
    spec["inference"]["replicas"] = 0
    spec["training"]["optimizer"]["learningRate"] = 1e-9
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    return manifest


def options(mode: str, **others: object) -> list[str]:
    """Return arguments of `rlhf run`."""
    values = {"spec.fusion.interStage.mode": mode, "spec.fusion.intraStage.mode": "Disabled", **others}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def gathered(transfer: str, **others: object) -> list[str]:
    """Return options that gather the tail on one worker."""
    settings = {"threshold": THRESHOLD, "pool": 1, "transfer": transfer}
    return options("Fixed", **{f"spec.fusion.interStage.{name}": value for name, value in settings.items()}, **others)


def tokens_of(run_dir: Path) -> dict[tuple[int, int], list[int]]:
    """Return (iteration, sample) -> tokens, of the iterations whose journal is stored."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in sorted(run_dir.rglob("iteration-*.log")):
        for record, _ in unframe(path.read_bytes()):
            if record.WhichOneof("record") == "finished":
                key = record.finished.key
                found[key.iteration, key.sample] = unpack(record.finished.tokens).tolist()
    return found


def total(run_dir: Path, name: str) -> float:
    """Return the sum of a metric over iterations."""
    return math.fsum(line[name] for line in read_metrics(run_dir / "metrics.jsonl"))


def lengths(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of every iteration that depend on tokens alone."""
    names = ("iteration", "reward", "tokens", "response_tokens_max", "samples/truncated")
    return [{name: line.get(name) for name in names} for line in read_metrics(run_dir / "metrics.jsonl")]


def said(*runs: Ended) -> str:
    return "\n".join(f"kills {run.kills}\n{run.output[-3000:]}" for run in runs)


def same(run: Ended, run_dir: Path, off: tuple[Path, Path, Ended]) -> None:
    """Fail unless a run has the same results as the one without fusion."""
    assert run.code == 0, said(run)
    assert lengths(run_dir) == lengths(off[1]), said(run)
    undisturbed, tokens = tokens_of(off[1]), tokens_of(run_dir)
    assert tokens
    assert tokens == undisturbed, said(run)


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
def off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ended]:
    """Return (manifest, run folder, how it ended) of the job without fusion."""
    folder = tmp_path_factory.mktemp("fusion")
    manifest = write(folder)
    ended = run_job(manifest, folder / "off", options=options("Disabled"))
    assert ended.code == 0, said(ended)
    return manifest, folder / "off", ended


def test_a_gathered_tail_of_vllm_workers_changes_no_token_and_released_workers_score(
    off: tuple[Path, Path, Ended], tmp_path: Path
) -> None:
    run = run_job(off[0], tmp_path / "run", options=gathered("KV"))
    same(run, tmp_path / "run", off)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "pool-formed" in kinds, said(run)
    assert total(tmp_path / "run", "fusion/moved_kv") > 0, said(run)
    assert rebuilt(tmp_path / "run") == 0, "a moved cache is not computed again"
    scored = {span.worker for span in read_spans(tmp_path / "run" / "timeline.json") if span.name.startswith("score")}
    assert len([worker for worker in scored if worker.startswith("generation")]) == 2, scored


def test_sources_destinations_and_coordinators_killed_when_the_tail_gathers_change_no_token(
    off: tuple[Path, Path, Ended], tmp_path: Path
) -> None:
    victims = ("generation-0", "generation-1", "coordinator")
    kills = Kills(SEED, len(victims), victims, first=victims, at_event="pool-formed")
    run = run_job(off[0], tmp_path / "run", options=gathered("KV"), kills=kills)
    assert len(run.kills) == len(victims), said(run)
    same(run, tmp_path / "run", off)


def test_workers_of_two_engines_exchange_samples_by_their_tokens(
    off: tuple[Path, Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = {"spec.generation.engine": "tests.support.jobs.mixed_engines"}
    run = run_job(off[0], tmp_path / "run", options=gathered("Auto", **engine))
    same(run, tmp_path / "run", off)
    assert total(tmp_path / "run", "fusion/moved_kv") == 0
    assert total(tmp_path / "run", "fusion/moved_tokens") > 0, said(run)
    assert rebuilt(tmp_path / "run") > 0, "known tokens go through the other engine"
