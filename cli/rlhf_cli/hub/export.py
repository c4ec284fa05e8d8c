"""`rlhf export`: choose a checkpoint of a run, check it, and write its model as a folder for a hub.

Rule: the checkpoint's checksums, the target, and the repository and token of an upload are checked before the first
write.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_api.algorithms import ModelRole, graph_of
from rlhf_api.job import RLHFJob
from rlhf_cli.console import output
from rlhf_cli.hub.hub_folder import check_target, is_adapter, write_hub_folder
from rlhf_cli.hub.model_card import ExportedModel
from rlhf_cli.hub.upload import check_repository, upload
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import holds_run, why_no_run
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.reports.trackers.summary_json import FILE as SUMMARY
from rlhf_coordinator.storage import checkpoint
from rlhf_operator.manifests.mount_paths import JOB_KEY


@dataclass(frozen=True)
class ExportOptions:
    """The source and the target of an export."""

    run_dir: Path
    target: Path
    best: bool = False
    iteration: int | None = None
    push: str | None = None
    private: bool = True


def export(options: ExportOptions) -> int:
    """Write the folder, upload it if the options ask for that, and return the exit code. Raises RunError."""
    if options.best and options.iteration is not None:
        raise RunError("--best and --iteration: give one of them")
    job = _job(options.run_dir)
    checkpoints = _checkpoints(options.run_dir, job)
    folder, reward = _chosen(checkpoints, options)
    check_target(options.target)
    if options.push is not None:
        check_repository(options.push)
    if problem := checkpoint.verify(folder):
        raise RunError(f"RUN: checkpoint {folder}: {problem}; give another by --iteration", ExitCode.STORAGE)
    role = graph_of(job.spec).policy
    source = folder / role
    if not (source / "config.json").is_file():
        raise RunError(f"RUN: checkpoint {folder} has no {role}/config.json", ExitCode.BAD_MODEL)
    version = int(parse_json((folder / "checkpoint.json").read_bytes())["version"])
    summary = _summary(options.run_dir)
    model = ExportedModel(job, ModelRole(role), version, is_adapter(source), summary, reward, _own_version())
    write_hub_folder(source, options.target, model)
    output().print(f"{role} of iteration {version} is in {options.target}", markup=False, soft_wrap=True)
    if options.push is not None:
        message = f"{job.name}, iteration {version}"
        address = upload(options.target, options.push, message, private=options.private)
        output().print(f"uploaded to {address}", markup=False, soft_wrap=True)
    return int(ExitCode.OK)


def _job(run_dir: Path) -> RLHFJob:
    if not holds_run(run_dir):
        raise RunError(f"RUN {run_dir}: {why_no_run(run_dir)}")
    try:
        return RLHFJob.model_validate_json((run_dir / JOB_KEY).read_bytes())
    except OSError as error:
        raise RunError(f"RUN {run_dir}: {JOB_KEY} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = f"{JOB_KEY} is not of this version ({error.error_count()} fields are wrong)"
        raise RunError(f"RUN {run_dir}: {problem}; use the version that ran it") from error


def _checkpoints(run_dir: Path, job: RLHFJob) -> Path:
    """Return the folder of checkpoints: the one in the job's spec, or the one in a run folder that was copied."""
    if job.spec.checkpoints is None:
        raise RunError(f"RUN {run_dir}: its job has no spec.checkpoints, so it saved no model")
    places = (Path(job.spec.checkpoints.path), run_dir / "checkpoints")
    try:
        found = next((place for place in places if checkpoint.versions(place)), None)
    except JobError as error:
        raise RunError(f"RUN {run_dir}: {error}", ExitCode.STORAGE) from error
    if found is None:
        raise RunError(f"RUN {run_dir}: there is no checkpoint in {' or '.join(dict.fromkeys(map(str, places)))}")
    return found


def _chosen(path: Path, options: ExportOptions) -> tuple[Path, float | None]:
    """Return the selected checkpoint, and the reward of its evaluation if it is the best. Raises RunError when it is
    absent."""
    available = checkpoint.versions(path)
    best, reward = _best(path)
    if options.best:
        if best is None:
            raise RunError(f"--best: {path} names no best checkpoint; that needs spec.evaluation, or leave --best out")
        version = best
    else:
        version = available[0] if options.iteration is None else options.iteration
    if version not in available:
        which = "--best" if options.best else f"--iteration {version}"
        listed = ", ".join(map(str, sorted(available)))
        raise RunError(f"{which}: {path} has no checkpoint of iteration {version}; it has {listed}")
    return checkpoint.folder_of(path, version), reward if version == best else None


def _best(path: Path) -> tuple[int | None, float | None]:
    """Return version and reward of the best checkpoint; (None, None) where none is named."""
    try:
        facts = parse_json((path / checkpoint.BEST_FILE).read_bytes())
        return int(facts["version"]), float(facts["reward"])
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunError(f"{path / checkpoint.BEST_FILE} cannot be read: {error!r}", ExitCode.STORAGE) from error


def _summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run; empty if it has none that can be read."""
    try:
        summary = parse_json((run_dir / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _own_version() -> str:
    try:
        return version_of("rlhf-operator")
    except PackageNotFoundError:
        return ""
