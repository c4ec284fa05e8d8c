"""`spec.runPolicy.failurePolicy`: rules that choose an action when a pod ends, by exit code, condition, reason or
message."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from rlhf_api.api_model import ApiModel
from rlhf_api.user_patterns import MAX_PATTERN, checked_pattern

START_UP: Final = ("ContainersReady", "Initialized", "PodReadyToStartContainers", "PodScheduled", "Ready")
"""Conditions of starting pods, which carry no information about how they end."""


class ExitCodes(ApiModel):
    """Exit codes of the worker's or coordinator's container."""

    operator: Literal["In", "NotIn"] = "In"
    """In matches exit codes in `values`; NotIn matches other exit codes of failures."""
    values: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=64)]
    """Exit codes. 137 is a killed process, mostly for lack of memory."""


class PodConditionPattern(ApiModel):
    """A condition of a pod."""

    type: Annotated[str, Field(min_length=1, max_length=316, pattern=r"^([a-z0-9.-]+/)?[A-Za-z][A-Za-z0-9_.-]*$")]
    """Condition type, such as DisruptionTarget for evicted, preempted and lost pods."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Required status of the condition."""


class PodFailurePattern(ApiModel):
    """How the kubelet or container runtime describes an end. If both fields are set, both must match."""

    reasons: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """Reasons, one of which must match, such as Evicted, UnexpectedAdmissionError or OOMKilled."""
    message: (
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_PATTERN),
            AfterValidator(checked_pattern),
        ]
        | None
    ) = None
    """Regular expression (RE2 syntax) to find in the message: the kubelet's message for a pod, or the last log lines of
    a container that ended by itself."""


class FailureRule(ApiModel):
    """A rule: an action, and the ends that it matches by onExitCodes, onPodConditions or onPodFailure, and by group."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the rule in conditions and events."""
    action: Literal["Ignore", "Restart", "FailJob"]
    """Ignore restarts without counting. Restart restarts and counts towards backoffLimit. FailJob ends the job at
    once."""
    scope: Literal["Pod", "Group", "Job"] = "Pod"
    """The scope of a restart: the pod, all pods of its group, or all pods of the job with the coordinator."""
    groups: (
        Annotated[
            list[Literal["coordinator", "generation", "inference", "training"]], Field(min_length=1, max_length=4)
        ]
        | None
    ) = None
    """Groups that the rule applies to; unset: all."""
    on_exit_codes: ExitCodes | None = None
    """Matches containers that exited by themselves with one of the codes, but not in a disrupted or deleted pod."""
    on_pod_conditions: Annotated[list[PodConditionPattern], Field(min_length=1, max_length=16)] | None = None
    """Matches pods that ended, or will soon, with at least one of these conditions."""
    on_pod_failure: PodFailurePattern | None = None
    """Matches pods and containers with such a description of their end."""


class FailurePolicy(ApiModel):
    """Rules for the end of pods. The first rule that matches decides."""

    rules: Annotated[list[FailureRule], Field(max_length=20)] = Field(default_factory=list)
    """Rules, which precede the built-in ones: disruptions are ignored; exit codes 20 to 23 (reward, model, prompts,
    storage), and 2, 24 and 25 of the coordinator, fail the job, since a restart cannot help; other failures, and
    evictions for storage beyond the pod's limits, restart and count."""
