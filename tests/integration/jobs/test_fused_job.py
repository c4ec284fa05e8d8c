"""A real job whose actor and critic train together ends with the bits of one that trains them one after the other."""

import json
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, run_job, trained
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

ITERATIONS = 4
SEED = 5
VICTIM = "training-1"


@pytest.mark.timeout(1800)
def test_a_fused_job_with_a_killed_rank_trains_the_weights_of_a_serial_job(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)
    off = run_job(manifest, tmp_path / "off", settings=("fusion.intraStage.mode=Disabled",))
    kills = Kills(SEED, 1, [VICTIM], in_phases=("Training",), iterations_between=1)
    fused = run_job(manifest, tmp_path / "fused", settings=("fusion.intraStage.mode=FusedSplit",), kills=kills)
    assert trained(off.run_dir) == trained(fused.run_dir), str(fused)
    choice = json.loads(fused.read("journal/job.json"))["schedule"]
    assert choice["method"] == "fused-split"
    assert set(choice["predicted"]) == {"serial-1f1b", "fused-split"}
    log = fused.read("logs/coordinator.log")
    assert log.count("training runs schedule fused-split") == 1, "chosen once, also when the group starts again"
    for line in fused.lines:
        assert line["training/schedule"] == 2.0
        assert line["training/bubble_seconds"] > 0
        assert line["training/predicted_step_seconds"] == choice["predicted"]["fused-split"]
    timeline = fused.read("timeline.json")
    assert '"predicted/critic/I"' in timeline
    assert '"train/critic/W"' in timeline
    assert '"predicted_ms"' in timeline
