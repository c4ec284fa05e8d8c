"""Reports of a coordinator about its prompts: the number left out, and the passes over each source."""

import json
import logging
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import write_files

from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.iteration_metrics import given_metrics
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.recovery import open_journal, open_run
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.service.status import job_status
from rlhf_coordinator.state.job_state import JobContext, job_context
from rlhf_coordinator.storage.restore import Restored
from rlhf_coordinator.storage.tokenizer_files import IDENTITY


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
        run, _ = opened(job_context(job, schedule_json(job.spec)), tmp_path / "run", resume=False)
    text = "3 of 7 prompts are longer than spec.rollout allows, and are left out: red 1, blue 2"
    assert text in caplog.messages
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert text in [event["message"] for event in events if event["kind"] == "prompts-left-out"]
    metrics = given_metrics(run)
    assert metrics["prompts/filtered"] == 3
    assert metrics["prompts/red/passes"] == metrics["prompts/blue/passes"] == 12 / 2 / 2


@pytest.mark.parametrize(("iterations", "warned"), [(2, True), (3, False)])
def test_sorted_windows_that_read_no_prompt_twice_are_warned_of(tmp_path: Path, iterations: int, warned: bool) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p1 p{n}"}) + "\n" for n in range(8)))
    rollout, prompts = {"batchSize": 4, "maxPromptTokens": 8}, {"path": str(file), "lengthWindow": 5}
    job = write_files(tmp_path, iterations=iterations, prompts=prompts, rollout=rollout)
    run, _ = opened(job_context(job, schedule_json(job.spec)), tmp_path / "run", resume=False)
    assert any("lengthWindow is 5, but sorts nothing" in text for text in run.warnings) == warned


def opened(context: JobContext, run_dir: Path, *, resume: bool) -> tuple[JobRun, Restored]:
    return open_run(context, open_journal(run_dir), run_dir, resume=resume)


def leave(run: JobRun) -> None:
    """Release the journal for another coordinator."""
    assert run.journal.lock is not None
    run.journal.lock.close()


EDITS = {
    "chat_template.jinja": "{{ messages[0].content }}!",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "x"}',
    "tokenizer.json": "{}",
    "vocab.txt": "p1",
}


@pytest.mark.parametrize("file", EDITS)
def test_a_run_goes_on_only_by_the_tokenizer_and_template_that_it_began_by(tmp_path: Path, file: str) -> None:
    job = write_files(tmp_path)
    context = job_context(job, schedule_json(job.spec))
    leave(opened(context, tmp_path / "run", resume=False)[0])
    (tmp_path / "policy" / "model.safetensors").write_text("other weights change no prompt")
    leave(opened(context, tmp_path / "run", resume=True)[0])
    edited = tmp_path / "policy" / file
    edited.parent.mkdir(exist_ok=True)
    edited.write_text(EDITS[file])
    with pytest.raises(JobError, match=r"models.actor.path \(tokenizer and chat template\) = .*, now it is") as error:
        opened(context, tmp_path / "run", resume=True)
    assert error.value.failure.reason == "JobChanged"


def test_a_run_goes_on_only_with_the_prompts_that_it_is_evaluated_on(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "p1"}\n')
    job = write_files(tmp_path, evaluation={"prompts": {"path": str(held_out)}})
    context = job_context(job, schedule_json(job.spec))
    leave(opened(context, tmp_path / "run", resume=False)[0])
    held_out.write_text('{"prompt": "p2"}\n')
    with pytest.raises(JobError, match=r"spec.evaluation.prompts \(settings and contents\) = .*, now it is"):
        opened(context, tmp_path / "run", resume=True)


def test_a_journal_of_a_version_that_noted_neither_goes_on(tmp_path: Path) -> None:
    job = write_files(tmp_path)
    context = job_context(job, schedule_json(job.spec))
    run, _ = opened(context, tmp_path / "run", resume=False)
    facts = run.journal.job()
    assert facts["identity"].pop(IDENTITY)
    run.journal.write_job(facts)
    leave(run)
    (tmp_path / "policy" / "vocab.txt").write_text("p1")
    opened(context, tmp_path / "run", resume=True)


def test_warnings_of_prompts_come_with_every_start(tmp_path: Path) -> None:
    job = write_files(tmp_path, prompts={"path": str(tmp_path / "prompts.jsonl"), "chatTemplate": True})
    (tmp_path / "policy" / "chat_template.jinja").write_text("<|user|> {{ messages[0].content }} <|end|>")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p1"}\n{"prompt": "<|user|> p2"}\n')
    context = job_context(job, schedule_json(job.spec))
    for _ in range(2):
        run, _ = opened(context, tmp_path / "run", resume=True)
        (warning,) = run.warnings
        assert "prompts.jsonl line 2 holds <|user|>, a mark of the chat template" in warning
        assert job_status(run).warnings == [warning]
        leave(run)
