"""Prepare a resolved job for this machine: render it, assign devices and ports, write its files.

Rule: no process of the job starts here.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_api.problems import ManifestError
from rlhf_api.protocol import read_job
from rlhf_cli.load_job import LoadedJob
from rlhf_cli.local.devices import LocalMachine, allot_devices
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.pods_to_processes import LocalProcess, device_demands, job_file_content, local_processes
from rlhf_cli.local.ports import LOOPBACK, HeldPorts, JobPorts, claim, free_ports, is_free
from rlhf_cli.local.run_folder import RunFolder
from rlhf_common.json_document import parse_json
from rlhf_common.names import Env, Group
from rlhf_operator.certificates import new_authority
from rlhf_operator.manifests import render
from rlhf_operator.manifests.mount_paths import JOB_KEY
from rlhf_planner.plan_search.device_plan import DevicePlan


@dataclass(frozen=True)
class LocalJob:
    """A job ready to be supervised."""

    job: RLHFJob
    """The resolved job."""
    processes: list[LocalProcess]
    """All processes, the coordinator first."""
    notes: tuple[str, ...]
    """Notes for the user about the devices."""
    address: str
    """host:port of the coordinator."""
    job_file: bytes
    """Content of the file from which the coordinator reads the job."""


def plan_processes(
    loaded: LoadedJob, machine: LocalMachine, port: int | None = None, take: Callable[[int], bool] = is_free
) -> LocalJob:
    """Return the processes of a job loaded for this machine without starting them or writing a file.

    `port`: the port requested for the coordinator; None means a free one. `take` says whether another port is free, and
    may reserve it. Raises RunError, TemplateError.
    """
    job = loaded.resolved
    objects = render(job, {})
    allotment = allot_devices(device_demands(objects), machine)
    free = free_ports(Random(), take)  # noqa: S311 only to keep two runs apart
    ports = JobPorts(free, None if port is None else claim(port))
    processes = local_processes(objects, loaded.run_paths, allotment.shares, ports, os.environ)
    address = f"{LOOPBACK}:{ports.coordinator}"
    return LocalJob(job, processes, allotment.notes, address, job_file_content(objects))


def prepare_job(
    loaded: LoadedJob,
    folder: RunFolder,
    machine: LocalMachine,
    port: int | None,
    reserved_ports: HeldPorts,
    *,
    resume: bool,
) -> LocalJob:
    """Assign devices and ports, write the job file and certificates into the run folder, and return the job.

    `reserved_ports` reserves the ports. Raises RunError, TemplateError.
    """
    paths = folder.paths
    local = plan_processes(loaded, machine, port, reserved_ports.take)
    if resume:
        for process in local.processes:
            if process.group is Group.COORDINATOR:
                process.env[Env.RESUME] = "1"
    now = datetime.now(UTC)
    new_authority(local.job.name, now).issue([LOOPBACK, "localhost"], now).write(paths.certificates)
    folder.write(JOB_KEY, local.job_file)
    return local


def check_unchanged(job_file: Path, job: RLHFJob) -> None:
    """Raise ManifestError for fixed fields that differ from those of the job file, which may be of another version.

    Sizes that `spec.devices` chooses may differ. Raises RunError for a file that cannot be read as a job.
    """
    if not job_file.is_file():
        return
    try:
        before = read_job(parse_json(job_file.read_bytes()))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        remedy = "resume by the version of rlhf that wrote it, or begin a new run in another --run-dir"
        raise RunError(f"--resume: {job_file} is no job that can be read: {remedy} ({why})") from error
    if job.spec.devices is not None:
        sizes = DevicePlan.from_spec(job.spec).sizes(job.spec)
        before = read_job(sizes.written_into(before.model_dump(mode="json", by_alias=True)))
    if problems := manifest.forbidden_changes(before, job, ended=True):
        raise ManifestError(problems, f"cannot resume the run in {job_file.parent}")
