"""A real job whose plan decodes one sample at a time finds that out, and changes its plan at a checkpoint.

Decoding waits in each step, so that the gain over the iterations left exceeds the cost of a restart on a busy machine.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tests.support.jobs import slow_engine
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import edited_spec, write_job

from rlhf_api import manifest as manifests
from rlhf_api.device_sizes import DevicePlanRecord, plan_request
from rlhf_coordinator.device_plan import REPLANNING_KEY
from rlhf_coordinator.learned_figures import PLAN_KEY

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

DEVICES, ITERATIONS = 5, 18
SLOW = "generation.engine=engines.slow_engine"


def slow_plan(manifest: Path) -> DevicePlanRecord:
    """Return a plan whose workers decode one sample at a time."""
    return DevicePlanRecord.model_validate(
        {
            "request": plan_request(manifests.load(manifest).spec),
            "summary": "Dedicated 2 + 1, one sample at a time",
            "predictedSeconds": 0.1,
            "sizes": {
                "placement": "Dedicated",
                "generation": {"replicas": 2, "maxBatchSize": 1, "parallelism": {"tensor": 1}},
                "inference": {"replicas": 1},
            },
        }
    )


def asking(folder: Path, replan: str, run_dir: Path) -> Path:
    """Write a job with a given replan mode, and a run folder whose journal has its slow plan."""
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=16, responses=48)
    with edited_spec(manifest) as spec:
        del spec["inference"], spec["generation"]["replicas"]
        spec["devices"] = {"count": DEVICES, "memory": 1, "fixed": ["Training"], "replan": replan}
        spec["checkpoints"] = {"path": str(run_dir / "checkpoints"), "every": 2}
    (folder / "engines").mkdir()
    shutil.copy(slow_engine.__file__, folder / "engines")
    journal = run_dir / "journal"
    journal.mkdir(parents=True)
    plan = slow_plan(manifest).model_dump(mode="json", by_alias=True, exclude_none=True)
    (journal / "job.json").write_text(json.dumps({PLAN_KEY: plan}))
    return manifest


def plan_of(run: Ended) -> DevicePlanRecord:
    """Return the plan in the journal of a run."""
    return DevicePlanRecord.model_validate(json.loads(run.read("journal/job.json"))[PLAN_KEY])


def events(run: Ended, kind: str) -> list[str]:
    """Return the messages of the events of a kind."""
    lines = [json.loads(line) for line in run.read("events.jsonl").splitlines()]
    return [line["message"] for line in lines if line["kind"] == kind]


def test_a_job_changes_its_plan_once_and_learns_the_same_also_if_its_coordinator_dies_in_the_change(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "changed"
    manifest = asking(tmp_path, "Auto", run_dir)
    kills = Kills(1, 1, ("coordinator",), at_event="replan")
    changed = run_job(manifest, run_dir, settings=[SLOW], options=["--resume"], kills=kills)
    plan = plan_of(changed)
    generation = plan.sizes.generation
    assert generation is not None
    assert generation.max_batch_size > 1, "several samples at a time"
    assert plan.sizes.training is None, "spec.devices.fixed"
    assert plan.since in range(4, ITERATIONS)
    assert plan.since % 2 == 0, "only at a checkpoint"
    assert changed.output.count("the job starts again with another plan") == 1
    assert len(events(changed, "replan")) == len(events(changed, "replanned")) == 1
    assert f"plan for {DEVICES} devices: {plan.summary}" in changed.output
    assert [line["iteration"] for line in changed.lines] == list(range(ITERATIONS))
    assert not json.loads(changed.read("journal/job.json"))[REPLANNING_KEY].get("adopted")

    document = slow_plan(manifest).sizes.written_into(yaml.safe_load(manifest.read_text()))
    del document["spec"]["devices"], document["spec"]["checkpoints"]
    explicit = manifest.with_name("explicit.yaml")
    explicit.write_text(yaml.safe_dump(document, sort_keys=False))
    assert_same_weights(changed, run_job(explicit, tmp_path / "untouched"))


def test_a_job_that_only_reports_keeps_its_plan_and_says_what_another_one_would_gain(tmp_path: Path) -> None:
    run_dir = tmp_path / "reported"
    manifest = asking(tmp_path, "Report", run_dir)
    run = run_job(manifest, run_dir, settings=[SLOW, "iterations=6"], options=["--resume"])
    assert plan_of(run) == slow_plan(manifest)
    [said, *_] = events(run, "plan-drift")
    assert "instead of the predicted 0.1 s: " in said
    assert not events(run, "replan")
    assert f"plan: {said}" in run.output
    assert any(line.get("plan/drift", 0) > 1.2 for line in run.lines)
