"""A real job that lets its devices be divided is stopped, killed and resumed with one plan, and learns the same bits as
a job whose manifest has the same sizes.
"""

import json
from pathlib import Path

import pytest
import yaml
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import edited_spec, write_job

from rlhf_api.device_sizes import DevicePlanRecord
from rlhf_common.names import ExitCode
from rlhf_coordinator.learned_figures import PLAN_KEY as KEY

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

DEVICES = 3
SEED = 4


def recorded(run_dir: Path) -> DevicePlanRecord:
    """Return the plan in the journal of a run."""
    return DevicePlanRecord.model_validate(json.loads((run_dir / "journal" / "job.json").read_text())[KEY])


def test_a_job_goes_on_with_its_plan_and_learns_what_the_same_sizes_in_a_manifest_learn(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=3, every=1)
    with edited_spec(manifest) as spec:
        del spec["inference"], spec["generation"]["replicas"], spec["training"]["parallelism"]
        spec["devices"] = {"count": DEVICES}
    stopped = run_job(manifest, tmp_path / "chosen", interrupt_after=1, code=ExitCode.INTERRUPTED)
    plan = recorded(stopped.run_dir)
    assert f"plan for {DEVICES} devices: {plan.summary}" in stopped.output
    assert "as the run folder records" not in stopped.output

    kills = Kills(SEED, 1, ("coordinator",), longest_calm_seconds=0.5)
    ended = run_job(manifest, stopped.run_dir, options=["--resume"], kills=kills)
    assert "as the run folder records" in ended.output
    assert recorded(ended.run_dir) == plan
    assert json.loads(ended.read("job.json"))["spec"]["placement"] == plan.sizes.placement

    written = plan.sizes.written_into(yaml.safe_load(manifest.read_text()))
    del written["spec"]["devices"]
    explicit = manifest.with_name("explicit.yaml")
    explicit.write_text(yaml.safe_dump(written, sort_keys=False))
    assert_same_weights(ended, run_job(explicit, tmp_path / "explicit"))
