"""A real job whose actor and critic train together ends with the bits of one that trains them one after the other."""

import hashlib
import json
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

ITERATIONS = 4
SEED = 5
VICTIM = "training-1"


def trained(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of weights and moments in the newest checkpoint."""
    newest = max(run_dir.glob("checkpoints/iteration-*"))
    files = sorted(newest.rglob("*.safetensors"))
    return {str(file.relative_to(newest)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def said(*runs: Ended) -> str:
    return "\n".join(f"kills {run.kills}\n{run.output[-3000:]}" for run in runs)


@pytest.mark.timeout(1800)
def test_a_fused_job_with_a_killed_rank_trains_the_weights_of_a_serial_job(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)
    off = run_job(manifest, tmp_path / "off", options=["--set", "spec.fusion.intraStage.mode=Disabled"])
    kills = Kills(SEED, 1, [VICTIM], in_phases=("Training",), iterations_between=1)
    fused = run_job(
        manifest, tmp_path / "fused", options=["--set", "spec.fusion.intraStage.mode=FusedSplit"], kills=kills
    )
    assert (off.code, fused.code, len(fused.kills)) == (0, 0, 1), said(off, fused)
    assert trained(tmp_path / "off") == trained(tmp_path / "fused"), said(off, fused)
    choice = json.loads((tmp_path / "fused" / "journal" / "job.json").read_text())["schedule"]
    assert choice["method"] == "fused-split"
    assert set(choice["predicted"]) == {"serial-1f1b", "fused-split"}
    log = (tmp_path / "fused" / "logs" / "coordinator.log").read_text()
    assert log.count("training runs schedule fused-split") == 1, "chosen once, also when the group starts again"
    lines = [json.loads(line) for line in (tmp_path / "fused" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["training/schedule"] == 2.0
        assert line["training/bubble_seconds"] > 0
        assert line["training/predicted_step_seconds"] == choice["predicted"]["fused-split"]
    timeline = (tmp_path / "fused" / "timeline.json").read_text()
    assert '"predicted/critic/I"' in timeline
    assert '"train/critic/W"' in timeline
    assert '"predicted_ms"' in timeline
