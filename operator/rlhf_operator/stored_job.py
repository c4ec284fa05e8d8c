"""The remembered form of a stored RLHFJob: the parts that are read, and the problems of unreadable ones. Rule: pure.

Parts that violate the status' model are dropped one by one; after _ROUNDS of them, the whole status is dropped.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api.job.scheduling import ELASTIC_ANNOTATION, QUEUE_LABEL
from rlhf_api.job.status import RLHFJobStatus
from rlhf_common import names
from rlhf_common.nesting import MAX_DEPTH, too_deep
from rlhf_operator.untrusted import NAME_MAX, identity_of, shown, text, whole

Json = dict[str, Any]

SPEC_MAX: Final = 1_000_000
"""Most characters of a spec as JSON: it must fit a ConfigMap, which the API server limits to 1 MiB."""
UNREADABLE: Final = "unreadable"
"""Field of a remembered job: the problem of its manifest, of which only a part is remembered."""
_QUEUE_LABELS: Final = f"{QUEUE_LABEL.partition('/')[0]}/"
"""Prefix of the labels that determine the queue of a job and its order there."""
_KEPT: Final = ("creationTimestamp", "deletionTimestamp")
_SCALARS: Final = (str, int, float, bool)
_ROUNDS: Final = 64
"""Most validations of a status; each failed one drops an entry or a field. After them, the whole status is dropped."""
_ENTRIES: Final = ("conditions", "groups")
"""Lists of a status from which single entries are dropped."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job to remember."""

    version: int
    uid: str
    body: bytes
    """The job as JSON."""
    wrong: str
    """Problem of the unreadable part; empty if there is none."""
    operator_class: str = ""
    """Class of the operators that reconcile it."""


def stored_of(body: Mapping[str, Any]) -> StoredJob:
    """Return the job to remember from the API server's object. Raises UnreadableError if its identity, its namespace or
    its generation is malformed.
    """
    meta = body.get("metadata")
    identity = identity_of(meta)
    assert isinstance(meta, dict)
    metadata: Json = {
        "name": identity.name,
        "namespace": text(meta.get("namespace"), "metadata.namespace", NAME_MAX, empty=False),
        "uid": identity.uid,
        "resourceVersion": str(identity.version),
    }
    metadata |= _metadata(meta)
    spec, wrong = _spec(body.get("spec"))
    status, odd = status_of(body.get("status"))
    job: Json = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}
    job |= ({"status": status} if status is not None else {}) | ({UNREADABLE: wrong} if wrong else {})
    named = spec.get("operatorClass") if isinstance(spec, dict) else None
    written = json.dumps(job, separators=(",", ":")).encode()
    return StoredJob(identity.version, identity.uid, written, wrong or odd, named if isinstance(named, str) else "")


def read_part(job: Mapping[str, Any]) -> Json:
    """Return the part of a remembered job whose change makes a plan outdated.

    Other labels and annotations, which tools may write many times per minute, are ignored.
    """
    meta = job["metadata"]
    labels = {name: value for name, value in meta.get("labels", {}).items() if name.startswith(_QUEUE_LABELS)}
    ours = names.FINALIZER in meta.get("finalizers", ())
    relevant = {name: value for name, value in meta.items() if name not in ("resourceVersion", "labels", "finalizers")}
    return {**job, "metadata": {**relevant, "labels": labels, "finalizer": ours}}


def _metadata(meta: Mapping[str, Any]) -> Json:
    retained: Json = {name: meta[name] for name in _KEPT if isinstance(meta.get(name), str)}
    labels, finalizers = meta.get("labels"), meta.get("finalizers")
    if isinstance(labels, dict):
        retained["labels"] = {name: value for name, value in labels.items() if type(name) is type(value) is str}
    annotations = meta.get("annotations")
    if isinstance(annotations, dict) and isinstance(annotations.get(ELASTIC_ANNOTATION), str):
        retained["annotations"] = {ELASTIC_ANNOTATION: annotations[ELASTIC_ANNOTATION]}
    if isinstance(finalizers, list):
        retained["finalizers"] = [finalizer for finalizer in finalizers if isinstance(finalizer, str)]
    if meta.get("generation") is not None:
        retained["generation"] = whole(meta["generation"], "metadata.generation")
    return retained


def _spec(spec: Any) -> tuple[Any, str]:
    """Return the remembered part of a manifest, and its problem."""
    if place := too_deep(spec):
        wrong = f"spec.{place[:NAME_MAX]}: it is nested more than {MAX_DEPTH} levels deep"
    elif len(json.dumps(spec)) > SPEC_MAX:
        wrong = f"spec: it is larger than {SPEC_MAX} characters of JSON"
    else:
        return spec, ""
    # Scalar fields are kept, such as managedBy and suspend.
    said = spec.items() if isinstance(spec, dict) else ()
    return {name: value for name, value in said if isinstance(value, _SCALARS)}, wrong


def status_of(status: Any) -> tuple[Json | None, str]:
    """Return the remembered part of a status, and its problem."""
    if status is None:
        return None, ""
    if not isinstance(status, dict):
        return {}, f"status is {shown(status)}, must be an object"
    if place := too_deep(status):
        return {}, f"status.{place[:NAME_MAX]}: it is nested more than {MAX_DEPTH} levels deep"
    readable, wrong = dict(status), ""
    for _ in range(_ROUNDS):
        try:
            RLHFJobStatus.model_validate(readable)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            wrong = wrong or f"status.{'.'.join(map(str, first['loc']))} is {shown(first['input'])}: {first['msg']}"
            _leave_out(readable, first["loc"])
        else:
            return readable, wrong
    return {}, wrong


def _leave_out(status: Json, place: tuple[int | str, ...]) -> None:
    """Drop the entry, or the whole field, with an error from `status`."""
    field = next((name for name in status if name == place[0]), None) if place else None
    if field is None:
        status.clear()
    elif field in _ENTRIES and len(place) > 1 and isinstance(place[1], int):
        status[field] = [entry for number, entry in enumerate(status[field]) if number != place[1]]
    else:
        del status[field]
