"""Reading an RLHFJob manifest: YAML in, a checked job out, or everything that is wrong with it at once.

Owns the order of checks: YAML, shape (models), rules that cross fields, what this version lacks. A manifest with a
wrong field is still checked against every rule that does not read that field. `resolve` makes all defaults that depend
on other fields or on the manifest's folder explicit. Only `load` and `resolve` look at files, and only at names.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api import mode_words, object_meta, validation_messages
from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.job.models import Models, ModelSource
from rlhf_api.names import API_VERSION, GROUP, KIND
from rlhf_api.problems import ManifestError, Problem
from rlhf_api.rules.rule import UnknownValueError, Values
from rlhf_api.rules.table import IMMUTABLE, IMMUTABLE_MESSAGE, RULES
from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_api.structural_schema import job_schema, with_defaults, without_nulls
from rlhf_api.yaml_document import Document, read_documents

__all__ = [
    "ManifestError", "Problem", "broken_rules", "checked_job", "dump", "forbidden_changes", "is_foreign",
    "job_document", "load", "object_name", "parse", "parse_stored", "read_text", "resolve",
]  # fmt: skip

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""`owner/name` on a model hub; a folder of that name beside the manifest wins."""


def load(path: Path) -> RLHFJob:
    """The checked job of a manifest file. Raises ManifestError; its `source` is the path."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a manifest file. Raises ManifestError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem("", str(path), f"cannot be read ({why}): give the path of an RLHFJob manifest in YAML")
        raise ManifestError([problem], str(path)) from error


def parse(text: str, source: str = "manifest") -> RLHFJob:
    """The checked job of a manifest's text, which may hold other objects beside the one RLHFJob. Raises ManifestError
    with every problem, in the order of the file.
    """
    try:
        return checked_job(job_document(text), source)
    except ManifestError as error:
        raise ManifestError(error.problems, source) from error


def job_document(text: str) -> Document:
    """The one RLHFJob among the documents of a text, not checked. Raises ManifestError."""
    documents = read_documents(text)
    jobs = documents if len(documents) == 1 else [each for each in documents if not is_foreign(each)]
    if len(jobs) != 1:
        line = jobs[1].first_line if jobs else None
        found = f"the file holds {len(jobs) or 'no'} RLHFJobs: give one with a single RLHFJob"
        raise ManifestError([Problem("", None, found, line)])
    return jobs[0]


def object_name(document: Document) -> str:
    """Return kind and name of a document's object, such as `RLHFJob tiny`, as far as it has them."""
    data = document.data if isinstance(document.data, dict) else {}
    metadata = data.get("metadata")
    names = metadata if isinstance(metadata, dict) else {}
    parts = (data.get("kind"), names.get("name") or names.get("generateName"))
    return " ".join(str(part) for part in parts if part)


def is_foreign(document: Document) -> bool:
    """Return whether a document is a whole object that is no RLHFJob and is not meant to be one."""
    data = document.data
    if not isinstance(data, dict):
        return False
    version, kind = data.get("apiVersion"), data.get("kind")
    if not (isinstance(version, str) and version and isinstance(kind, str) and kind):
        return False
    return kind.lower() != KIND.lower() and version.partition("/")[0] != GROUP


def parse_stored(data: dict[str, Any]) -> RLHFJob:
    """The checked job of an object as the API server stores it: `parse` of what is read already, at a tenth of its
    cost. The API server kept the words for modes of an earlier version (`mode_words`). Raises ManifestError.
    """
    if isinstance(spec := data.get("spec"), dict):
        data = {**data, "spec": mode_words.present(spec)}
    return checked_job(Document(data), "")


def checked_job(document: Document, source: str) -> RLHFJob:
    """The job of a document that was read. Raises ManifestError."""
    if document.problems:
        raise ManifestError(document.problems, source)
    document.data = without_nulls(document.data)
    problems = _strangers(document)
    if problems:
        raise ManifestError(problems, source)
    object_meta.name_generated(document)
    document.data.pop("status", None)  # written by the operator; the API server ignores it here too
    job, problems = _shape(document)
    problems += _crossing(document, problems)
    if problems or job is None:
        raise ManifestError(sorted(problems, key=lambda each: each.line or 0), source)
    return job


def broken_rules(job: RLHFJob) -> list[Problem]:
    """What the rules say about a job that was not read from a manifest, or not by this version."""
    return _crossing(Document(_plain(job)), [])


def forbidden_changes(old: RLHFJob, new: RLHFJob) -> list[Problem]:
    """Fields of a live job that may not change and did; what the API server's transition rules say, for `--resume`."""
    before, after = Values(_plain(old)), Values(_plain(new))
    found = []
    for path in IMMUTABLE:
        was, now = _value(before, path), _value(after, path)
        if was != now:
            found.append(
                Problem(path, now, f"{IMMUTABLE_MESSAGE} (it was {Problem(path, was, '').shown_value or 'unset'})")
            )
    return found


def resolve(job: RLHFJob, base: Path) -> RLHFJob:
    """The job with everything explicit: relative paths made absolute against `base`, the manifest's folder; the
    reference and the critic start from the actor where the graph needs them and none is given, and are left out
    where it does not; the upper clip range written out; no status. Resolving twice changes nothing.
    Folders are not opened.
    """
    spec = job.spec
    algorithm = spec.algorithm.fields.resolved(lambda path: _file(path, base))
    update: dict[str, Any] = {
        "algorithm": spec.algorithm.model_copy(update={spec.algorithm.name: algorithm}),
        "models": _resolved_models(job, base),
        "prompts": spec.prompts.model_copy(update={"path": _file(spec.prompts.path, base)}),
    }
    if spec.checkpoints is not None:
        update["checkpoints"] = spec.checkpoints.model_copy(update={"path": _file(spec.checkpoints.path, base)})
    return job.model_copy(update={"spec": spec.model_copy(update=update), "status": None})


def dump(job: RLHFJob) -> dict[str, Any]:
    """A job as plain JSON-able data in the manifest's names; `RLHFJob.model_validate` takes it back unchanged."""
    return _plain(job)


def _resolved_models(job: RLHFJob, base: Path) -> Models:
    models = job.spec.models
    graph = graph_of(job.spec)
    reward = models.reward
    if reward.function is not None and reward.function.file is not None:
        function = reward.function.model_copy(update={"file": _file(reward.function.file, base)})
        reward = reward.model_copy(update={"function": function})
    if reward.model is not None:
        reward = reward.model_copy(update={"model": _source(reward.model, base)})
    resolved: dict[str, Any] = {"reward": reward}
    for role in ModelRole:
        if role.kind is not ModelKind.REWARD:
            source = models.source(role) if role in graph.roles else None
            resolved[role] = None if source is None else _source(source, base)
    return models.model_copy(update=resolved)


def _source(source: ModelSource, base: Path) -> ModelSource:
    path = source.path
    if _HUB_ID.fullmatch(path) and not (base / path).exists():
        return source
    return source.model_copy(update={"path": _file(path, base)})


def _file(path: str, base: Path) -> str:
    # Lexically, as a link may mean something else inside a pod.
    return os.path.normpath(base.absolute() / path)


def _strangers(document: Document) -> list[Problem]:
    """A file that is something else altogether gets one plain answer rather than fifty unknown fields."""
    if not isinstance(document.data, dict):
        message = f"must be a mapping with {', '.join(job_schema()['properties'])}"
        return [Problem("", document.data, message, 1)]
    found = []
    for name, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = document.data.get(name)
        if value != right:
            message = f"must be {right}" if value is not None else f"is required: write {name}: {right}"
            found.append(Problem(name, value, message, document.line_of(name)))
    return found


def _shape(document: Document) -> tuple[RLHFJob | None, list[Problem]]:
    """Every field by itself; the job when nothing is wrong."""
    problems = object_meta.problems_of(document)
    try:
        return RLHFJob.model_validate(document.data, by_alias=True, by_name=False), problems
    except ValidationError as error:
        # Unions are rules too, checked with the others so that they are reported even beside another problem.
        details = [each for each in error.errors(include_url=False) if each["type"] != "exactly_one"]
        return None, problems + [validation_messages.problem_of_error(each, document) for each in details]


def _crossing(document: Document, problems: list[Problem]) -> list[Problem]:
    """What crosses fields, judged on the manifest with its defaults; rules over a field with a problem are void."""
    values = Values(with_defaults(document.data, job_schema()), {each.field for each in problems})
    said = [(rule.field, rule.broken(values)) for rule in RULES]
    said += [(lack.field, lack.broken(values)) for lack in UNAVAILABLE]
    return [
        Problem(field, _value(values, field), message, document.line_of(field))
        for field, message in said
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
