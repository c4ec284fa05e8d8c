"""Turns a manifest into a resolved job for this machine: absolute paths, every default filled in.

Rule: after this no path depends on a working directory. A path that is plainly a local one and does not exist is
refused here, before any process starts; a model path of the form `organisation/name` without such a folder is a hub id
and left as it is. Reads the file system, never writes it.
"""

import re
from pathlib import Path
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode
from rlhf_operator.local.errors import RunError

_HUB_ID: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
CHECKPOINTS: Final = "checkpoints"
"""Folder inside the run folder for a job that names none: then Ctrl-C and --resume work without any setting."""


def resolve(job: RLHFJob, base: Path, run_dir: Path) -> RLHFJob:
    """`job` with paths made absolute against `base` (the manifest's folder). Raises RunError naming the field."""
    document = job.model_dump(mode="json", by_alias=True)
    spec = document["spec"]
    for role in ("actor", "critic", "reference"):
        if source := spec["models"].get(role):
            source["path"] = _model(source["path"], base, f"spec.models.{role}.path")
    reward = spec["models"]["reward"]
    if source := reward.get("model"):
        source["path"] = _model(source["path"], base, "spec.models.reward.model.path")
    if function := reward.get("function"):
        _function(function, base)
    spec["prompts"]["path"] = _file(spec["prompts"]["path"], base, "spec.prompts.path", ExitCode.BAD_DATA)
    if spec.get("checkpoints") is None:
        spec["checkpoints"] = {"path": str(run_dir / CHECKPOINTS)}
    else:
        spec["checkpoints"]["path"] = str((base / spec["checkpoints"]["path"]).resolve())
    return RLHFJob.model_validate(document)


def _function(function: dict[str, Any], base: Path) -> None:
    field = "spec.models.reward.function"
    if function.get("file"):
        function["file"] = _file(function["file"], base, f"{field}.file", ExitCode.USAGE)
    if function.get("configMap"):
        raise RunError(
            f"{field}.configMap: {function['configMap']!r}: there are no ConfigMaps on one machine; "
            f"give {field}.file or {field}.module"
        )


def _model(value: str, base: Path, field: str) -> str:
    path = (base / Path(value).expanduser()).resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(f"{field}: {value!r}: no config.json in {path}", ExitCode.BAD_MODEL)
        return str(path)
    if _HUB_ID.match(value) and not path.exists():
        return value
    raise RunError(
        f"{field}: {value!r}: no such folder ({path}); give a Hugging Face model folder or a hub id", ExitCode.BAD_MODEL
    )


def _file(value: str, base: Path, field: str, exit_code: ExitCode) -> str:
    path = (base / Path(value).expanduser()).resolve()
    if not path.is_file():
        raise RunError(f"{field}: {value!r}: no such file ({path}), relative to the manifest's folder", exit_code)
    return str(path)
