"""Describes how the body of a pod deviates from the expected form, for the fields that are read.

Meant for a body that could not be read, so it may be slow.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_operator.untrusted import LISTED_MAX, UnreadableError, bounded, shown


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Reported(_Shape):
    reason: str | None = None
    message: str | None = None


class _Terminated(_Reported):
    exitCode: int | None = None  # noqa: N815
    startedAt: str | None = None  # noqa: N815
    finishedAt: str | None = None  # noqa: N815
    containerID: str | None = None  # noqa: N815


class _Running(_Shape):
    startedAt: str | None = None  # noqa: N815


class _State(_Shape):
    waiting: _Reported | None = None
    terminated: _Terminated | None = None
    running: _Running | None = None


class _Container(_Shape):
    name: str
    restartCount: int | None = None  # noqa: N815
    ready: bool | None = None
    state: _State | None = None
    lastState: _State | None = None  # noqa: N815


class _Condition(_Reported):
    type: str
    status: str | None = None
    lastTransitionTime: str | None = None  # noqa: N815


class _Status(_Reported):
    phase: str | None = None
    podIP: str | None = None  # noqa: N815
    conditions: list[_Condition] | None = Field(default=None, max_length=LISTED_MAX)
    containerStatuses: list[_Container] | None = Field(default=None, max_length=LISTED_MAX)  # noqa: N815
    initContainerStatuses: list[_Container] | None = Field(default=None, max_length=LISTED_MAX)  # noqa: N815


class _Metadata(_Shape):
    name: str
    uid: str
    resourceVersion: str  # noqa: N815
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: str | None = None  # noqa: N815
    deletionTimestamp: str | None = None  # noqa: N815
    deletionGracePeriodSeconds: int | None = None  # noqa: N815
    finalizers: list[str] | None = None


class _Named(_Shape):
    name: str
    restartPolicy: str | None = None  # noqa: N815


class _Spec(_Shape):
    restartPolicy: str | None = None  # noqa: N815
    containers: list[_Named] | None = None
    initContainers: list[_Named] | None = None  # noqa: N815
    schedulingGates: list[_Named] | None = None  # noqa: N815


class _Pod(_Shape):
    metadata: _Metadata
    spec: _Spec | None = None
    status: _Status | None = None


def misshapen(body: Mapping[str, Any]) -> str:
    """Return how the form of a pod's body is wrong, at its first wrong place; empty if it is right."""
    try:
        bounded(body)
        _Pod.model_validate(body)
    except UnreadableError as error:
        return str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place} is {shown(first['input'])}: {first['msg']}"
    return ""
