"""`python -m rlhf_coordinator`: the coordinator of one job, configured by `names.Env` variables alone.

Ends with `names.ExitCode`: 0 when the job is complete, 130 when it was stopped (SIGTERM, or the Stop call) after a
checkpoint, else the code of its failure, whose words are the last log line. Killed at any moment, it goes on from its
journal when it is started again with the same RLHF_RUN_DIR. This process never loads torch.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from rlhf_api import control_pb2 as pb
from rlhf_api import protocol
from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.document import read
from rlhf_api.endpoint import Endpoint
from rlhf_api.job import RLHFJob
from rlhf_api.names import Env, ExitCode
from rlhf_api.problems import ManifestError
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.job_run import JobOutcome, JobRun, begin_run
from rlhf_coordinator.job.recorder import GuardedRecorder
from rlhf_coordinator.reports.recorder import RunRecorder
from rlhf_coordinator.scheduling.schedule import schedule_json
from rlhf_coordinator.service.last_report import write_last_report
from rlhf_coordinator.service.logs import configure_logs
from rlhf_coordinator.service.prometheus import open_endpoint
from rlhf_coordinator.service.server import order_stop
from rlhf_coordinator.service.serving import Addresses, serve
from rlhf_coordinator.state.job_state import JobContext, job_context
from rlhf_coordinator.storage import checkpoint
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_lock import hold
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import PromptSet, load_tokenizer, prompts_digest, read_prompts
from rlhf_coordinator.storage.restore import Restored, restore

log = logging.getLogger("coordinator")

EXIT_CODES: Final = {"Complete": ExitCode.OK, "Stopped": ExitCode.INTERRUPTED, "Failed": ExitCode.FAILED}


def environment(name: Env) -> str:
    """A variable that must be set."""
    value = os.environ.get(name, "")
    if not value:
        raise JobError("Usage", f"{name} is not set", field=name, exit_code=ExitCode.USAGE)
    return value


def read_job(path: Path) -> RLHFJob:
    """The resolved job."""
    try:
        return protocol.read_job(read(path.read_text()).data)
    except (OSError, ManifestError, ValidationError) as error:
        message = f"{path} is not a valid RLHFJob: {error}"
        raise JobError("Usage", message, field=Env.JOB_FILE, exit_code=ExitCode.USAGE) from error


def read_prompt_set(context: JobContext, journal: Journal, digest: str) -> PromptSet:
    """The prompts of a job, tokenized: now, or when its journal was begun."""
    spec = context.spec
    each = samples_per_prompt(spec)
    prompts = tokenized_before(journal, digest)
    if prompts is None:
        tokenizer = load_tokenizer(spec.models.actor.path, spec.rank_group)
        prompts = read_prompts(spec.prompts, tokenizer, spec.rollout.max_prompt_tokens)
        keep_tokenized(journal, digest, prompts)
    return PromptSet(
        prompts,
        seed=spec.seed,
        shuffle=spec.prompts.shuffle,
        per_iteration=spec.rollout.batch_size // each,
        samples_per_prompt=each,
    )


def prepare() -> tuple[JobRun, Restored]:
    """Everything that can fail before the first worker is let in. Raises JobError."""
    job = read_job(Path(environment(Env.JOB_FILE)))
    run_dir = Path(environment(Env.RUN_DIR))
    awaits = os.environ.get(Env.AWAIT_WORKERS) == "1"
    context = job_context(job, schedule_json(job.spec), awaits_workers=awaits)
    journal = Journal(run_dir / "journal", hold(run_dir / "journal"))
    digest = prompts_digest(job.spec)
    prompts = read_prompt_set(context, journal, digest)
    resume = os.environ.get(Env.RESUME) == "1"
    restored = restore(context, journal, digest, time.time_ns(), resume=resume)
    if job.spec.checkpoints is not None:
        checkpoint.remove_leftovers(Path(job.spec.checkpoints.path))
    for warning in restored.warnings:
        log.warning(warning)
    closed = restored.last_closed
    recorder = GuardedRecorder(RunRecorder(run_dir, closed[0] if closed else restored.ledger.iteration), run_dir)
    if closed:
        recorder.iteration(*closed)
    return begin_run(context, restored, journal, prompts, recorder), restored


async def run_job(run: JobRun, restored: Restored, endpoint: Endpoint | None) -> JobOutcome:
    """Serves the job with signals as the way to stop it."""
    certificates = os.environ.get(Env.CERTIFICATES)
    addresses = Addresses(
        listen=environment(Env.LISTEN),
        certificates=Path(certificates) if certificates else None,
    )

    def stop() -> None:
        order_stop(run, checkpoint=True, reason="asked to stop by a signal")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await serve(run, restored, addresses, endpoint)


def failed(failure: pb.Failure) -> int:
    """The last log line, and the exit code."""
    where = f"{failure.field}: " if failure.field else ""
    log.error("%s: %s%s", failure.reason or "Failed", where, failure.message)
    return failure.exit_code or ExitCode.FAILED


def main() -> int:
    """Runs the process."""
    # transformers imports torch wherever it is installed; this process needs its tokenizers alone.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    configure_logs()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The first process of a container ends by no signal that it does not handle, and there is nothing to save yet.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(ExitCode.INTERRUPTED))
    try:
        # First: its kubelet asks from now on, and a journal may take minutes to read.
        address = os.environ.get(Env.METRICS)
        endpoint = open_endpoint(address) if address else None
        run, restored = prepare()
        outcome = asyncio.run(run_job(run, restored, endpoint))
    except JobError as error:
        return failed(error.failure)
    write_last_report(run)
    if outcome.failure is not None:
        return failed(outcome.failure)
    return EXIT_CODES[outcome.phase]


if __name__ == "__main__":
    sys.exit(main())
