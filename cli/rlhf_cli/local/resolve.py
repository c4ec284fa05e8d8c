"""What a local run adds to `manifest.resolve`: what must exist here does, and checkpoints have a place.

Rule: what is plainly missing is refused here, before any process starts, with the exit code the job itself would end
with. A model path that is a hub id is left for the workers. Reads the file system, never writes it.
"""

from pathlib import Path
from typing import Final

from rlhf_api import manifest
from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.job.policy import Checkpoints
from rlhf_api.names import ExitCode
from rlhf_cli.local.errors import RunError

CHECKPOINTS: Final = "checkpoints"
"""Folder inside the run folder for a job that names none: then Ctrl-C and --resume work without any setting."""


def resolve(job: RLHFJob, base: Path, run_dir: Path) -> RLHFJob:
    """The resolved job of a local run; `base` is the manifest's folder. Raises RunError naming the field."""
    resolved = manifest.resolve(job, base)
    spec = resolved.spec
    if spec.checkpoints is None:
        checkpoints = Checkpoints(path=str(run_dir.absolute() / CHECKPOINTS))
        resolved = resolved.model_copy(update={"spec": spec.model_copy(update={"checkpoints": checkpoints})})
    check_files(resolved)
    return resolved


def check_files(job: RLHFJob) -> None:
    """Raises RunError for the first file or folder of a resolved job that is not there."""
    spec = job.spec
    for role in ModelRole:
        if source := spec.models.given(role):
            _model(spec.models.path_field(role), source.path)
    reward = spec.models.reward
    if reward.function is not None:
        field = "spec.models.reward.function"
        if reward.function.file is not None:
            _file(f"{field}.file", reward.function.file, ExitCode.USAGE)
        if reward.function.config_map is not None:
            raise RunError(
                f"{field}.configMap = {reward.function.config_map!r}: there are no ConfigMaps on one machine; "
                f"give {field}.file or {field}.module"
            )
    _file("spec.prompts.path", spec.prompts.path, ExitCode.BAD_DATA)


def _model(field: str, path: str) -> None:
    folder = Path(path)
    if not folder.is_absolute():  # a hub id
        return
    if not folder.is_dir():
        raise RunError(f"{field} = {path!r}: no such folder; give a Hugging Face model folder", ExitCode.BAD_MODEL)
    if not (folder / "config.json").is_file():
        raise RunError(f"{field} = {path!r}: the folder has no config.json", ExitCode.BAD_MODEL)


def _file(field: str, path: str, exit_code: ExitCode) -> None:
    if not Path(path).is_file():
        raise RunError(f"{field} = {path!r}: no such file; paths are relative to the manifest's folder", exit_code)
