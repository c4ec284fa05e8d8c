"""`spec.runPolicy.failurePolicy`: what the end of a pod means, by exit code, by condition, by reason and by words."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from rlhf_api import patterns
from rlhf_api.api_model import ApiModel

START_UP: Final = ("ContainersReady", "Initialized", "PodReadyToStartContainers", "PodScheduled", "Ready")
"""Conditions that every pod goes through when it starts; they say nothing about an end."""


class ExitCodes(ApiModel):
    """Exit codes of our container."""

    operator: Literal["In", "NotIn"] = "In"
    """In: one of `values`; NotIn: any failure but those."""
    values: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=64)]
    """Exit codes; 137 is a process that was killed, for its memory as a rule."""


class PodConditionPattern(ApiModel):
    """A condition of a pod."""

    type: Annotated[str, Field(min_length=1, max_length=316, pattern=r"^([a-z0-9.-]+/)?[A-Za-z][A-Za-z0-9_.-]*$")]
    """Such as DisruptionTarget, which evicted and preempted pods and those of lost nodes have."""
    status: Literal["True", "False", "Unknown"] = "True"
    """The status it has."""


class PodFailurePattern(ApiModel):
    """How the kubelet, or the container runtime, tells of an end; what is set must hold together."""

    reasons: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """One of these, such as Evicted, UnexpectedAdmissionError or OOMKilled."""
    message: (
        Annotated[str, Field(min_length=1, max_length=patterns.LONGEST), AfterValidator(patterns.checked)] | None
    ) = None
    """A regular expression (RE2's syntax) that is found in the words: of a pod, the kubelet's; of a container that
    ended by itself, the last lines of its log."""


class FailureRule(ApiModel):
    """One rule: which ends it is about (one of the fields named on...; of some groups), and what follows."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Names the rule in conditions and events."""
    action: Literal["Ignore", "Restart", "FailJob"]
    """Ignore restarts without counting; Restart counts towards backoffLimit; FailJob ends the job at once."""
    scope: Literal["Pod", "Group", "Job"] = "Pod"
    """What is restarted: the pod, all pods of its group, or all of the job, the coordinator included."""
    groups: (
        Annotated[
            list[Literal["coordinator", "generation", "inference", "training"]], Field(min_length=1, max_length=4)
        ]
        | None
    ) = None
    """Groups that the rule is about; all when unset."""
    on_exit_codes: ExitCodes | None = None
    """Containers that ended by themselves with such a code; not those of a disrupted or deleted pod."""
    on_pod_conditions: Annotated[list[PodConditionPattern], Field(min_length=1, max_length=16)] | None = None
    """Pods that ended, or are about to, with at least one of these conditions."""
    on_pod_failure: PodFailurePattern | None = None
    """Pods and containers whose end is told so."""


class FailurePolicy(ApiModel):
    """Rules in order; the first that matches decides."""

    rules: Annotated[list[FailureRule], Field(max_length=20)] = Field(default_factory=list)
    """After these come the built-in ones: disruptions are ignored; exit codes that no restart cures (20 to 23: reward,
    model, prompts, storage) fail the job; anything else is restarted and counted, an eviction for storage beyond the
    pod's own limits too."""
