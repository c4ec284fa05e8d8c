"""What a coordinator says of its prompts: how many were left out, and how often each source is gone through."""

import json
import logging
from pathlib import Path

import pytest
from tests.support.coordinated import write_files

from rlhf_coordinator.job.iteration_metrics import given_metrics
from rlhf_coordinator.loop.recovery import open_run
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context


def test_prompts_that_are_left_out_are_counted_in_log_event_and_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, lengths in {"red": (3, 9, 2), "blue": (9, 10, 5, 4)}.items():
        lines = [json.dumps({"prompt": "p1 " * length}) for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("red", "blue")]
    rollout = {"batchSize": 12, "maxPromptTokens": 8}
    job = write_files(tmp_path, prompts={"sources": sources, "overlong": "Filter"}, rollout=rollout)
    with caplog.at_level(logging.WARNING):
        run, _ = open_run(job_context(job, schedule_json(job.spec)), tmp_path / "run", resume=False)
    text = "3 of 7 prompts are longer than spec.rollout allows, and are left out: red 1, blue 2"
    assert text in caplog.messages
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert text in [event["message"] for event in events if event["kind"] == "prompts-left-out"]
    metrics = given_metrics(run)
    assert metrics["prompts/filtered"] == 3
    assert metrics["prompts/red/passes"] == metrics["prompts/blue/passes"] == 12 / 2 / 2
