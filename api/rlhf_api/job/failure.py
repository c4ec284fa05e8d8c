"""`spec.runPolicy.failurePolicy`: what the end of a pod means, by exit code, condition, reason or message."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from rlhf_api.api_model import ApiModel
from rlhf_api.user_patterns import MAX_PATTERN, checked_pattern

START_UP: Final = ("ContainersReady", "Initialized", "PodReadyToStartContainers", "PodScheduled", "Ready")
"""Conditions that every pod goes through when it starts; they tell nothing about its end."""


class ExitCodes(ApiModel):
    """Exit codes of the worker's or coordinator's container."""

    operator: Literal["In", "NotIn"] = "In"
    """In matches one of `values`; NotIn matches every other failure."""
    values: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=64)]
    """Exit codes. 137 is that of a killed process, mostly for lack of memory."""


class PodConditionPattern(ApiModel):
    """A condition of a pod."""

    type: Annotated[str, Field(min_length=1, max_length=316, pattern=r"^([a-z0-9.-]+/)?[A-Za-z][A-Za-z0-9_.-]*$")]
    """Type of the condition, such as DisruptionTarget, of evicted, preempted and lost pods."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status that the condition must have."""


class PodFailurePattern(ApiModel):
    """How the kubelet or the container runtime describes an end. Where both fields are set, both must match."""

    reasons: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """Reasons of which one must match, such as Evicted, UnexpectedAdmissionError or OOMKilled."""
    message: (
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_PATTERN),
            AfterValidator(checked_pattern),
        ]
        | None
    ) = None
    """Regular expression (RE2 syntax) that must be found in the message: the kubelet's message of a pod, or the last
    lines of the log of a container that ended by itself."""


class FailureRule(ApiModel):
    """One rule: which ends it matches (by one of the fields on..., in some groups), and what follows."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the rule in conditions and events."""
    action: Literal["Ignore", "Restart", "FailJob"]
    """Ignore restarts without counting. Restart restarts and counts towards backoffLimit. FailJob ends the job at
    once."""
    scope: Literal["Pod", "Group", "Job"] = "Pod"
    """What is restarted: the pod, all pods of its group, or all pods of the job, the coordinator included."""
    groups: (
        Annotated[
            list[Literal["coordinator", "generation", "inference", "training"]], Field(min_length=1, max_length=4)
        ]
        | None
    ) = None
    """Groups that the rule applies to; unset: all."""
    on_exit_codes: ExitCodes | None = None
    """Matches containers that ended by themselves with such an exit code; not those of a disrupted or deleted pod."""
    on_pod_conditions: Annotated[list[PodConditionPattern], Field(min_length=1, max_length=16)] | None = None
    """Matches pods that ended, or are about to end, with at least one of these conditions."""
    on_pod_failure: PodFailurePattern | None = None
    """Matches pods and containers whose end is described so."""


class FailurePolicy(ApiModel):
    """Rules about the end of pods, tried in order; the first that matches decides."""

    rules: Annotated[list[FailureRule], Field(max_length=20)] = Field(default_factory=list)
    """The rules. Built-in ones follow: disruptions are ignored; exit codes that no restart cures (20 to 23: reward,
    model, prompts, storage) fail the job; other failures are restarted and counted, also an eviction for storage beyond
    the pod's own limits."""
