"""A manifest's job made ready to run on this machine: resolved, rendered, placed, its files written.

Rule: everything a user may have got wrong is found here, before the first process starts.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from random import Random

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_api.names import Env, Group
from rlhf_api.problems import ManifestError
from rlhf_cli.local.devices import LocalMachine, allot_devices
from rlhf_cli.local.pods_to_processes import LocalProcess, device_demands, job_file_content, processes
from rlhf_cli.local.ports import LOOPBACK, claim, free_ports
from rlhf_cli.local.resolve import resolve
from rlhf_cli.local.run_folder import RunFolder, RunPaths
from rlhf_operator.certificates import new_authority
from rlhf_operator.manifests import render
from rlhf_operator.manifests.paths import JOB_KEY


@dataclass(frozen=True)
class LocalJob:
    """Ready to be supervised."""

    job: RLHFJob
    """Resolved."""
    processes: list[LocalProcess]
    notes: tuple[str, ...]
    address: str
    """host:port of the coordinator."""


def plan(job: RLHFJob, paths: RunPaths, machine: LocalMachine, ports: Iterator[int]) -> LocalJob:
    """Processes of a resolved job, without touching anything. Raises RunError, TemplateError."""
    objects = render(job, {})
    allotment = allot_devices(device_demands(objects), machine)
    found = processes(objects, paths, allotment.shares, ports, os.environ)
    coordinator = next(process for process in found if process.group is Group.COORDINATOR)
    return LocalJob(job, found, allotment.notes, f"{LOOPBACK}:{coordinator.port}")


def prepare_job(job: RLHFJob, folder: RunFolder, machine: LocalMachine, port: int | None, *, resume: bool) -> LocalJob:
    """Checks, resolves and places a job and writes job.json and certificates into the run folder.

    Raises RunError, TemplateError, and ManifestError for a resumed job whose fixed fields have changed.
    """
    paths = folder.paths
    resolved = resolve(job, paths.base, paths.run_dir)
    if resume:
        _check_unchanged(paths.job_file, resolved)
    free = free_ports(Random())  # noqa: S311 only to keep two runs apart
    local = plan(resolved, paths, machine, free if port is None else chain([claim(port)], free))
    if resume:
        for process in local.processes:
            if process.group is Group.COORDINATOR:
                process.env[Env.RESUME] = "1"
    now = datetime.now(UTC)
    new_authority(resolved.name, now).issue([LOOPBACK, "localhost"], now).write(paths.certificates)
    folder.write(JOB_KEY, job_file_content(render(resolved, {})))
    return local


def _check_unchanged(path: Path, job: RLHFJob) -> None:
    if not path.is_file():
        return
    before = RLHFJob.model_validate_json(path.read_bytes())
    if problems := manifest.changes(before, job):
        raise ManifestError(problems, f"cannot resume the run in {path.parent}")
