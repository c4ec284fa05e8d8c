"""From a manifest file to the jobs in it, for `rlhf run`, `rlhf plan` and `rlhf validate`.

A document is parsed, changed by `--set`, checked, and resolved. The pods are checked for a cluster, the files for this
machine.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from rlhf_api import manifest
from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.job.environment import Environment
from rlhf_api.job.policy import Checkpoints
from rlhf_api.job.rewards import GivenReward
from rlhf_api.job.rollout import Prompts
from rlhf_api.problems import ManifestError, Problem, Severity
from rlhf_api.yaml_document import Document, read_documents
from rlhf_cli.local.data_check import data_problems
from rlhf_cli.local.errors import MissingFileError, RunError
from rlhf_cli.local.run_folder import RunPaths
from rlhf_cli.overrides import apply
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_FIELD, DRAFT_MODEL_FIELD, ExitCode
from rlhf_common.surrogates import escaped, has_half_pair
from rlhf_coordinator import tensor_split_check
from rlhf_coordinator.model_folder_problems import model_folder_problems
from rlhf_coordinator.tokenizer_problems import template_warnings
from rlhf_operator.manifests.pod_problems import problems_of_pods

CHECKPOINTS: Final = "checkpoints"
"""Folder in the run folder for the checkpoints of a job that names none: Ctrl-C and --resume need one."""
_PAIR: Final = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
"""Surrogate pair in JSON, for example of an emoji; YAML would read two halves."""
_POD_ROOT: Final = Path("/")
"""Base of relative paths in a pod, which has no manifest."""


class Target(StrEnum):
    """The place where jobs will run."""

    CLUSTER = "cluster"
    LOCAL = "local"


@dataclass(frozen=True)
class LoadedJob:
    """One document of a manifest file after the whole pass."""

    document: Document
    job: RLHFJob | None
    """The resolved job; None if it cannot be resolved, and for an object of another kind."""
    problems: tuple[Problem, ...] = ()
    """Errors and warnings; the line number is None where unknown."""
    paths: RunPaths | None = None
    """Paths of a run's files on this machine; None unless `load_resolved` loaded the job."""

    @property
    def resolved(self) -> RLHFJob:
        """The resolved job. Raises ManifestError where there is none."""
        if self.job is None:
            raise ManifestError(self.errors)
        return self.job

    @property
    def run_paths(self) -> RunPaths:
        """Paths of a run's files on this machine. Raises ValueError unless `load_resolved` loaded the job."""
        if self.paths is None:
            raise ValueError(f"{self.name} was not loaded for a run on this machine")
        return self.paths

    @property
    def name(self) -> str:
        """Kind and name of the object, as far as present."""
        return manifest.object_name(self.document) or "no object"

    @property
    def of_another_kind(self) -> bool:
        """Whether this is an object of another kind, which is not checked here."""
        return self.job is None and not self.problems

    @property
    def errors(self) -> list[Problem]:
        """Problems that are more than warnings."""
        return [problem for problem in self.problems if problem.severity is not Severity.WARNING]


def load_resolved(path: Path, overrides: Sequence[str], run_dir_of: Callable[[RLHFJob], Path]) -> LoadedJob:
    """Return the single job of a manifest file, changed by `overrides` and resolved for a run on this machine.

    `run_dir_of` returns the run folder of the checked job. Raises ManifestError for problems of the manifest, and
    RunError for an invalid override or the first unsuitable file.
    """
    document, source = _single_document(path, overrides)
    base = path.absolute().parent
    _check_encoding(base, base)
    resolved = manifest.resolved_job(document, base, source)
    paths = RunPaths(run_dir_of(resolved.job).absolute(), base)
    return LoadedJob(document, for_this_machine(resolved.job, paths), resolved.warnings, paths)


def for_this_machine(job: RLHFJob, paths: RunPaths) -> RLHFJob:
    """Return a resolved job with a folder for checkpoints. Raises RunError for the first missing or unsuitable file."""
    _check_encoding(paths.run_dir, paths.base)
    if job.spec.checkpoints is None:
        checkpoints = Checkpoints(path=str(paths.run_dir.absolute() / CHECKPOINTS))
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"checkpoints": checkpoints})})
    _check_files(job)
    return job


def _check_encoding(folder: Path, base: Path) -> None:
    if has_half_pair(str(folder)):
        raise RunError(f"{escaped(str(base))}: the manifest and its run folder need paths of UTF-8; rename them")


def load_documents(text: str, target: Target = Target.CLUSTER, folder: Path | None = None) -> list[LoadedJob]:
    """Return the documents of a manifest's text with their problems.

    For a cluster, the jobs' pods are checked too; for this machine, their files and data. Raises ManifestError for
    invalid YAML, and for a text without an RLHFJob.
    """
    documents = read_documents(text)
    loaded = [
        LoadedJob(document, None)
        if len(documents) > 1 and manifest.is_foreign(document)
        else _load(document, target, folder)
        for document in documents
    ]
    if all(document.of_another_kind for document in loaded):
        listed = ", ".join(document.name for document in loaded)
        raise ManifestError([Problem("", None, f"the file holds no RLHFJob: it has {listed}")])
    return loaded


def _load(document: Document, target: Target, folder: Path | None) -> LoadedJob:
    base = _POD_ROOT if folder is None or target is Target.CLUSTER else folder
    try:
        resolved = manifest.resolved_job(document, base)
    except ManifestError as error:
        return LoadedJob(document, None, tuple(error.problems))
    job, found = resolved.job, list[Problem]()
    if target is Target.CLUSTER:
        found = problems_of_pods(job)
    elif folder is not None:
        folders = _folder_problems(job)
        wrong = {problem.field for problem in folders}
        found = [*folders, *(problem for problem in _file_problems(job) if problem.field not in wrong)]
    return LoadedJob(document, job, (*(_with_line(problem, document) for problem in found), *resolved.warnings))


def _folder_problems(job: RLHFJob) -> list[Problem]:
    """Return errors and warnings about the model folders of a resolved job that are on this machine."""
    errors = [Problem(field, path, str(error)) for field, path, error in model_folder_problems(job.spec)]
    warnings = template_warnings(job.spec)
    return errors + [Problem(field, None, text, severity=Severity.WARNING) for field, text in warnings]


def _file_problems(job: RLHFJob) -> list[Problem]:
    """Return the problems with the files of a resolved job; a missing file is a warning."""
    try:
        _check_files(job)
    except RunError as error:
        field = str(error).partition(" ")[0]
        if not isinstance(error, MissingFileError):
            return [Problem(field, None, str(error))]
        return [Problem(field, None, f"{error}; data were not checked", severity=Severity.WARNING)]
    return data_problems(job.spec)


def _single_document(path: Path, overrides: Sequence[str]) -> tuple[Document, str]:
    """Return (document of the one RLHFJob of a file, changed by `overrides`; its name in messages)."""
    source = str(path)
    try:
        document = manifest.job_document(manifest.read_text(path))
    except ManifestError as error:
        raise ManifestError(error.problems, source) from error
    if not overrides or document.problems:
        return document, source
    data = document.data
    for override in overrides:
        data = apply(data, override)
    # Parse the result again, so that only values that YAML can express are set. Its line numbers would mislead.
    [changed] = read_documents(_PAIR.sub(_one_escape, json.dumps(data)))
    return Document(changed.data, problems=_without_lines(changed.problems)), _with_overrides(source, overrides)


def _with_overrides(source: str, overrides: Sequence[str]) -> str:
    return f"{source} with --set {' --set '.join(overrides)}"


def _one_escape(pair: re.Match[str]) -> str:
    """Return YAML's escape for a character that JSON writes as two escapes."""
    character = json.loads(f'"{pair[0]}"')
    return f"\\U{ord(character):08x}"


def _without_lines(problems: Sequence[Problem]) -> list[Problem]:
    return [replace(problem, line=None) for problem in problems]


def _with_line(problem: Problem, document: Document) -> Problem:
    return replace(problem, line=document.line_of(problem.field))


def _check_files(job: RLHFJob) -> None:
    """Raise RunError for the first file or folder of a resolved job that is absent or unsuitable, for a tensor split
    that a model does not allow, or for a ConfigMap. A hub id is not checked.
    """
    spec = job.spec
    for role in ModelRole:
        if source := spec.models.explicit_source(role):
            _check_model(spec.models.path_field(role), source.path)
    if (draft := spec.generation.speculation.draft_model) is not None:
        _check_model(DRAFT_MODEL_FIELD, draft.path)
    if (lora := spec.training.lora) is not None and lora.adapter is not None:
        _check_adapter(lora.adapter)
    for field, degree, problem in tensor_split_check.tensor_split_problems(spec):
        raise RunError(f"{field} = {degree}: {problem}")
    for entry in spec.models.all_rewards:
        _check_reward(entry)
    _check_environment(spec.rollout.environment)
    for name, path in spec.algorithm.fields.files.items():
        _check_file(f"spec.algorithm.{spec.algorithm.name}.{name}", path, ExitCode.USAGE)
    _check_prompts(spec.prompts)
    if spec.evaluation is not None and (held_out := spec.evaluation.held_out(spec.prompts)) is not None:
        _check_prompts(held_out)


def _check_prompts(prompts: Prompts) -> None:
    field = prompts.field
    for number, file in enumerate(prompts.files):
        name = f"sources[{number}].path" if prompts.sources else "path"
        if not Path(file.path).is_dir():
            _check_file(f"{field}.{name}", file.path, ExitCode.BAD_DATA)
    if prompts.chat_template_file is not None:
        _check_file(f"{field}.chatTemplateFile", prompts.chat_template_file, ExitCode.BAD_DATA)


def _check_reward(entry: GivenReward) -> None:
    own = entry.reward.own_model
    if own is not None and entry.name:  # the model of a single, unnamed reward was checked with its role
        _check_model(f"{entry.field}.{entry.reward.own_model_field}.path", own.path)
    function, field = entry.reward.function, f"{entry.field}.function"
    if function is None:
        return
    if function.file is not None:
        _check_file(f"{field}.file", function.file, ExitCode.USAGE)
    _check_no_config_map(field, function.config_map)


def _check_environment(environment: Environment | None) -> None:
    field = "spec.rollout.environment"
    if environment is None:
        return
    if environment.file is not None:
        _check_file(f"{field}.file", environment.file, ExitCode.USAGE)
    _check_no_config_map(field, environment.config_map)


def _check_no_config_map(field: str, config_map: str | None) -> None:
    if config_map is not None:
        raise RunError(
            f"{field}.configMap = {config_map!r}: there are no ConfigMaps on one machine; "
            f"give {field}.file or {field}.module"
        )


def _check_model(field: str, path: str) -> None:
    folder = Path(path)
    if not folder.is_absolute():  # a hub id
        return
    if not folder.is_dir():
        why = "no such folder; give a Hugging Face model folder"
        raise MissingFileError(f"{field} = {path!r}: {why}", ExitCode.BAD_MODEL)
    if not (folder / "config.json").is_file():
        adapters = ", but adapters: give the folder of their base model" if (folder / ADAPTER_CONFIG).is_file() else ""
        raise RunError(f"{field} = {path!r}: the folder has no config.json{adapters}", ExitCode.BAD_MODEL)


def _check_adapter(path: str) -> None:
    if Path(path).is_absolute() and not (Path(path) / ADAPTER_CONFIG).is_file():
        raise RunError(f"{ADAPTER_FIELD} = {path!r}: no PEFT folder; it has no {ADAPTER_CONFIG}", ExitCode.BAD_MODEL)


def _check_file(field: str, path: str, exit_code: ExitCode) -> None:
    if not Path(path).is_file():
        raise MissingFileError(
            f"{field} = {path!r}: no such file; paths are relative to the manifest's folder", exit_code
        )
