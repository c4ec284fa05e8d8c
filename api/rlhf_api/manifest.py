"""Reads an RLHFJob manifest: returns a checked job, or reports the problems of its fields and rules together.

`resolve` fills in the defaults that depend on other fields or on the manifest's folder.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from rlhf_api import object_meta, validation_messages
from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.job.evaluation import EvaluationPrompts
from rlhf_api.job.groups import Generation, Training
from rlhf_api.job.model_source import ModelSource
from rlhf_api.job.models import Models
from rlhf_api.job.rewards import Reward
from rlhf_api.job.rollout import Prompts, Rollout
from rlhf_api.problems import ManifestError, Problem
from rlhf_api.rules.advice import advice
from rlhf_api.rules.beyond_cel import refusals
from rlhf_api.rules.rule import UnknownValueError, Values
from rlhf_api.rules.table import IMMUTABLE, IMMUTABLE_MESSAGE, LAYOUT, LAYOUT_MESSAGE, RULES
from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_api.structural_schema import job_schema, with_defaults, without_nulls
from rlhf_api.yaml_document import Document, read_documents
from rlhf_common.names import API_VERSION, GROUP, KIND

__all__ = [
    "ManifestError", "Problem", "ResolvedJob", "broken_rules", "checked_job", "dump", "forbidden_changes", "is_foreign",
    "job_document", "load", "object_name", "parse", "parse_stored", "read_text", "resolve", "resolved_job",
]  # fmt: skip

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""`owner/name` on a model hub; a folder of that name next to the manifest takes precedence."""

PromptsType = TypeVar("PromptsType", Prompts, EvaluationPrompts)


@dataclass(frozen=True)
class ResolvedJob:
    """The checked job of a manifest, resolved (`resolve`)."""

    job: RLHFJob
    warnings: tuple[Problem, ...]
    """Doubtful settings of a valid manifest, with lines."""


def resolved_job(document: Document, base: Path, source: str = "") -> ResolvedJob:
    """Return the resolved job of a document. `base`: the folder for relative paths.

    Raises ManifestError.
    """
    job = checked_job(document, source)
    warnings = tuple(replace(problem, line=document.line_of(problem.field)) for problem in advice(job))
    return ResolvedJob(resolve(job, base), warnings)


def load(path: Path) -> RLHFJob:
    """Return the checked job of a manifest file. Raises ManifestError, whose `source` is the path."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a manifest file. Raises ManifestError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem("", str(path), f"cannot be read ({why}): give the path of an RLHFJob manifest in YAML")
        raise ManifestError([problem], str(path)) from error


def parse(text: str, source: str = "manifest") -> RLHFJob:
    """Return the checked job of a manifest's text, which may also contain other objects.

    Raises ManifestError.
    """
    try:
        return checked_job(job_document(text), source)
    except ManifestError as error:
        raise ManifestError(error.problems, source) from error


def job_document(text: str) -> Document:
    """Return the only document of a text, or that of its only RLHFJob, unchecked. Raises ManifestError."""
    documents = read_documents(text)
    jobs = documents if len(documents) == 1 else [document for document in documents if not is_foreign(document)]
    if len(jobs) != 1:
        line = jobs[1].first_line if jobs else None
        message = f"the file holds {len(jobs) or 'no'} RLHFJobs: give one with a single RLHFJob"
        raise ManifestError([Problem("", None, message, line)])
    return jobs[0]


def object_name(document: Document) -> str:
    """Return kind and name of a document's object, such as `RLHFJob tiny`, as far as they are set."""
    data = document.data if isinstance(document.data, dict) else {}
    metadata = data.get("metadata")
    names = metadata if isinstance(metadata, dict) else {}
    parts = (data.get("kind"), names.get("name") or names.get("generateName"))
    return " ".join(str(part) for part in parts if part)


def is_foreign(document: Document) -> bool:
    """Return whether a document has apiVersion and kind of another object, and not those of a mistyped RLHFJob."""
    data = document.data
    if not isinstance(data, dict):
        return False
    version, kind = data.get("apiVersion"), data.get("kind")
    if not (isinstance(version, str) and version and isinstance(kind, str) and kind):
        return False
    return kind.lower() != KIND.lower() and version.partition("/")[0] != GROUP


def parse_stored(data: dict[str, Any]) -> RLHFJob:
    """Return the checked job of a stored object. Raises ManifestError."""
    return checked_job(Document(data), "")


def checked_job(document: Document, source: str) -> RLHFJob:
    """Return the checked job of a document, whose data it changes. Raises ManifestError; problems of fields and rules
    are in the order of the file."""
    if document.problems:
        raise ManifestError(document.problems, source)
    document.data = without_nulls(document.data)
    problems = _not_a_job(document)
    if problems:
        raise ManifestError(problems, source)
    object_meta.fill_in_generated_name(document)
    document.data.pop("status", None)  # the operator writes it, and the API server ignores it here too
    job, problems = _check_fields(document)
    problems += _check_rules(document, problems)
    if job is not None:
        blamed = {problem.field for problem in problems}
        beyond = [problem for problem in refusals(job) if problem.field not in blamed]
        problems += [replace(problem, line=document.line_of(problem.field)) for problem in beyond]
    if problems or job is None:
        raise ManifestError(sorted(problems, key=lambda problem: problem.line or 0), source)
    return job


def broken_rules(job: RLHFJob) -> list[Problem]:
    """Return the problems of rules that a job breaks, for a job that did not come from a manifest, or not with this
    version."""
    return [*_check_rules(Document(_plain(job)), []), *refusals(job)]


def forbidden_changes(old: RLHFJob, new: RLHFJob, *, ended: bool = False) -> list[Problem]:
    """Return the changed fields that may not change in a live job, as the API server's transition rules do.

    `ended`: the run continues after all its processes have ended, so `LAYOUT` may change.
    """
    before, after = Values(_plain(old)), Values(_plain(new))
    free = LAYOUT if ended or (old.spec.suspend and new.spec.suspend) else ()
    problems = []
    for path in IMMUTABLE:
        was, now = _value(before, path), _value(after, path)
        if was != now and path not in free:
            message = LAYOUT_MESSAGE if path in LAYOUT else IMMUTABLE_MESSAGE
            problems.append(Problem(path, now, f"{message} (it was {Problem(path, was, '').shown_value or 'unset'})"))
    return problems


def resolve(job: RLHFJob, base: Path) -> RLHFJob:
    """Return the job with the defaults that depend on other fields or on the folder, without a status. Idempotent.

    Relative paths become absolute against `base`, the folder of the manifest; a hub id of a model stays. A policy or
    value role that the graph needs and the manifest does not set starts from the actor.
    """
    spec = job.spec
    algorithm = spec.algorithm.fields.resolved(lambda path: _file(path, base))
    update: dict[str, Any] = {
        "algorithm": spec.algorithm.model_copy(update={spec.algorithm.name: algorithm}),
        "models": _resolved_models(job, base),
        "generation": _resolved_generation(spec.generation, base),
        "training": _resolved_training(spec.training, base),
        "prompts": _resolved_prompts(spec.prompts, base),
        "rollout": _resolved_rollout(spec.rollout, base),
    }
    if spec.evaluation is not None and (own := spec.evaluation.prompts) is not None:
        inherited = _resolved_prompts(own.inherit(spec.prompts), base)
        update["evaluation"] = spec.evaluation.model_copy(update={"prompts": inherited})
    if spec.checkpoints is not None:
        update["checkpoints"] = spec.checkpoints.model_copy(update={"path": _file(spec.checkpoints.path, base)})
    return job.model_copy(update={"spec": spec.model_copy(update=update), "status": None})


def dump(job: RLHFJob) -> dict[str, Any]:
    """Return a job as plain JSON data with the manifest's names, valid input for `RLHFJob.model_validate`."""
    return _plain(job)


def _resolved_prompts(prompts: PromptsType, base: Path) -> PromptsType:
    path, template = prompts.path, prompts.chat_template_file
    several = prompts.sources
    files: dict[str, Any] = {
        "path": None if path is None else _file(path, base),
        "sources": several and [source.model_copy(update={"path": _file(source.path, base)}) for source in several],
        "chat_template_file": None if template is None else _file(template, base),
    }
    return prompts.model_copy(update=files)


def _resolved_rollout(rollout: Rollout, base: Path) -> Rollout:
    environment = rollout.environment
    if environment is None or environment.file is None:
        return rollout
    resolved = environment.model_copy(update={"file": _file(environment.file, base)})
    return rollout.model_copy(update={"environment": resolved})


def _resolved_models(job: RLHFJob, base: Path) -> Models:
    models = job.spec.models
    graph = graph_of(job.spec)
    several = models.rewards
    resolved: dict[str, Any] = {
        "rewards": None if several is None else [_resolved_reward(reward, base) for reward in several],
    }
    for role in ModelRole:
        if role.kind is ModelKind.REWARD:
            reward: Reward | None = getattr(models, role) if role in graph.roles else None
            resolved[role] = None if reward is None else _resolved_reward(reward, base)
        else:
            needed = (
                role in graph.roles or Models.model_fields[role].is_required()
            )  # the required model provides the tokenizer
            source = models.source(role) if needed else None
            resolved[role] = None if source is None else _source(source, base)
    return models.model_copy(update=resolved)


def _resolved_reward(reward: Reward, base: Path) -> Reward:
    update: dict[str, Any] = {}
    if reward.function is not None and reward.function.file is not None:
        update["function"] = reward.function.model_copy(update={"file": _file(reward.function.file, base)})
    if reward.model is not None:
        update["model"] = _source(reward.model, base)
    if reward.judge is not None and reward.judge.model is not None:
        update["judge"] = reward.judge.model_copy(update={"model": _source(reward.judge.model, base)})
    return reward.model_copy(update=update)


def _resolved_generation(generation: Generation, base: Path) -> Generation:
    speculation = generation.speculation
    if speculation.draft_model is None:
        return generation
    draft = speculation.draft_model.model_copy(update={"path": _folder(speculation.draft_model.path, base)})
    resolved = speculation.model_copy(update={"draft_model": draft})
    return generation.model_copy(update={"speculation": resolved})


def _resolved_training(training: Training, base: Path) -> Training:
    lora = training.lora
    if lora is None or lora.adapter is None:
        return training
    return training.model_copy(update={"lora": lora.model_copy(update={"adapter": _folder(lora.adapter, base)})})


def _source(source: ModelSource, base: Path) -> ModelSource:
    return source.model_copy(update={"path": _folder(source.path, base)})


def _folder(path: str, base: Path) -> str:
    """Return the folder of a model. A hub id stays unchanged, unless a folder of that name exists."""
    return path if _HUB_ID.fullmatch(path) and not (base / path).exists() else _file(path, base)


def _file(path: str, base: Path) -> str:
    # Lexically, since a link may have another meaning inside a pod.
    return os.path.normpath(base.absolute() / path)


def _not_a_job(document: Document) -> list[Problem]:
    """Return the problems of a document that is no RLHFJob, instead of one per unknown field; nothing if it is one."""
    if not isinstance(document.data, dict):
        message = f"must be a mapping with {', '.join(job_schema()['properties'])}"
        return [Problem("", document.data, message, 1)]
    problems = []
    for name, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = document.data.get(name)
        if value != right:
            message = f"must be {right}" if value is not None else f"is required: write {name}: {right}"
            problems.append(Problem(name, value, message, document.line_of(name)))
    return problems


def _check_fields(document: Document) -> tuple[RLHFJob | None, list[Problem]]:
    """Return (the job, or None if a field is wrong; the problems of single fields)."""
    problems = object_meta.metadata_problems(document)
    try:
        return RLHFJob.model_validate(document.data, by_alias=True, by_name=False), problems
    except ValidationError as error:
        # Unions are also rules, and are checked there so that they are reported together with other problems.
        details = [detail for detail in error.errors(include_url=False) if detail["type"] != "exactly_one"]
        return None, problems + [validation_messages.problem_of_error(detail, document) for detail in details]


def _check_rules(document: Document, problems: list[Problem]) -> list[Problem]:
    """Return the problems of broken rules, by the manifest with its defaults, without rules that read a wrong field."""
    values = Values(with_defaults(document.data, job_schema()), {problem.field for problem in problems})
    messages = [(rule.field, rule.broken(values)) for rule in RULES]
    messages += [(lack.field, lack.broken(values)) for lack in UNAVAILABLE]
    return [
        Problem(field, _value(values, field), message, document.line_of(field))
        for field, message in messages
        if message is not None
    ]


def _value(values: Values, path: str) -> Any:
    try:
        return values[path]
    except UnknownValueError:
        return None


def _plain(job: RLHFJob) -> dict[str, Any]:
    data: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return data
