"""`python -m rlhf_coordinator`: the coordinator of one job, configured by `names.Env` variables.

Exit codes (`names.ExitCode`): 0 when the job is complete, 130 when it was stopped, else the failure's code or 1. A
coordinator that was killed continues from its journal when it starts again with the same job and RLHF_RUN_DIR.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from rlhf_api import protocol
from rlhf_api.job import RLHFJob
from rlhf_api.problems import ManifestError
from rlhf_api.yaml_document import read_document
from rlhf_common import control_pb2 as pb
from rlhf_common.endpoint import Endpoint
from rlhf_common.names import Env, ExitCode
from rlhf_coordinator.device_plan import choose, take_plan, write_ran_job
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.job_run import JobOutcome, JobRun
from rlhf_coordinator.loop.recovery import open_journal, open_run
from rlhf_coordinator.model_folder_problems import check_model_folders
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.service.last_report import write_last_report
from rlhf_coordinator.service.logs import configure_logs, say_iteration, say_job
from rlhf_coordinator.service.prometheus import open_endpoint
from rlhf_coordinator.service.server import order_stop
from rlhf_coordinator.service.serving import ServiceAddresses, serve
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.storage.restore import Restored
from rlhf_coordinator.tensor_split_check import check_tensor_split
from rlhf_coordinator.tokenizer_problems import template_warnings

log = logging.getLogger("coordinator")

EXIT_CODES: Final = {"Complete": ExitCode.OK, "Stopped": ExitCode.INTERRUPTED, "Failed": ExitCode.FAILED}


def environment(name: Env) -> str:
    """Return a variable of the environment. Raises JobError when it is empty or not set."""
    value = os.environ.get(name, "")
    if not value:
        raise JobError("Usage", f"{name} is not set", field=name, exit_code=ExitCode.USAGE)
    return value


def read_job(path: Path) -> RLHFJob:
    """Return the resolved job in a file. Raises JobError when it cannot be read or is invalid."""
    try:
        return protocol.read_job(read_document(path.read_text()).data)
    except (OSError, ManifestError, ValidationError) as error:
        message = f"{path} is not a valid RLHFJob: {error}"
        raise JobError("Usage", message, field=Env.JOB_FILE, exit_code=ExitCode.USAGE) from error


def prepare() -> tuple[JobRun, Restored]:
    """Check the job and take steps 1 to 5 of `loop.recovery`; return the job's parts and the restored state.

    Raises JobError.
    """
    job_file = Path(environment(Env.JOB_FILE))
    job = read_job(job_file)
    say_job(job)
    check_model_folders(job.spec)
    run_dir = Path(environment(Env.RUN_DIR))
    journal = open_journal(run_dir)
    job, plan = take_plan(job, journal, lambda asked: choose(asked, run_dir))
    write_ran_job(job, run_dir, job_file)
    check_tensor_split(job.spec)
    awaits = os.environ.get(Env.AWAIT_WORKERS) == "1"
    context = job_context(job, schedule_json(job.spec), device_plan=plan, awaits_workers=awaits)
    run, restored = open_run(context, journal, run_dir, resume=os.environ.get(Env.RESUME) == "1")
    for _, warning in template_warnings(job.spec):
        run.warn("template-warning", warning)
    if plan is not None:
        run.event("device-plan", f"plan for spec.devices: {plan.words}")
    say_iteration(run)
    return run, restored


async def run_job(run: JobRun, restored: Restored, endpoint: Endpoint | None) -> JobOutcome:
    """Serve the job to its end, which SIGTERM and SIGINT request; return the outcome. Raises JobError."""
    certificates = os.environ.get(Env.CERTIFICATES)
    addresses = ServiceAddresses(
        listen=environment(Env.LISTEN),
        certificates=Path(certificates) if certificates else None,
    )

    def stop() -> None:
        order_stop(run, checkpoint=True, reason="asked to stop by a signal")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await serve(run, restored, addresses, endpoint)


def failed(failure: pb.Failure) -> int:
    """Log a failure; return its exit code, or 1 if it has none."""
    said = not failure.field or failure.message.startswith(f"{failure.field}: ")
    where = "" if said else f"{failure.field}: "
    log.error("%s: %s%s", failure.reason or "Failed", where, failure.message)
    return failure.exit_code or ExitCode.FAILED


def main() -> int:
    """Run the process; return its exit code."""
    # This process needs only the tokenizers of transformers, not torch.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    configure_logs()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Signals without a handler do not end the first process of a container. Nothing needs saving yet.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(ExitCode.INTERRUPTED))
    try:
        # First, so that probes are answered while the journal is read.
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
