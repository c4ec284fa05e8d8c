"""`spec.scheduling`, `spec.managedBy`: how schedulers and queues are told that the job's pods belong together.

Rule: only what the user decides. What the cluster serves, and which objects follow from it, is the operator's
(`rlhf_operator.gang`).
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.labels import SUBDOMAIN_FORM, SUBDOMAIN_MAX

ManagedBy = Literal["rlhf.dev/operator", "kueue.x-k8s.io/multikueue"]
OURS: Final = "rlhf.dev/operator"
"""The value of spec.managedBy under which this operator reconciles a job."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Label of a job that names the LocalQueue it waits in, as for every job that Kueue admits."""

Name = Annotated[str, Field(max_length=SUBDOMAIN_MAX, pattern=SUBDOMAIN_FORM)]


OPERATOR_CLASS_MAX: Final = 49
"""Characters: `rlhf-operator-<class>`, the name of a Lease, stays within a DNS label."""
OperatorClass = Annotated[str, Field(max_length=OPERATOR_CLASS_MAX, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class Gang(ApiModel):
    """All pods that the job needs to begin are placed together, or none."""

    mode: Literal["Auto", "Disabled", "Native", "Kueue", "Volcano", "Coscheduling"] = "Auto"
    """Auto is Kueue when the job has the label kueue.x-k8s.io/queue-name and the cluster serves Kueue; else Volcano or
    Coscheduling when a pod template names their scheduler; else Native (scheduling.k8s.io) when the cluster serves it;
    else Disabled."""
    queue: Name | None = None
    """Volcano: the Queue; its default queue when unset. Kueue takes the label kueue.x-k8s.io/queue-name instead."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Coscheduling: how long pods that were placed wait for the others before their nodes are given to somebody else;
    the scheduler's own default when unset."""


class Scheduling(ApiModel):
    """Placement of the job's pods as a whole; node selectors, tolerations and affinity are in pod templates."""

    gang: Gang = Field(default_factory=Gang)
    """All or nothing."""
    priority_class_name: Name | None = None
    """PriorityClass of every pod whose template names none, and of their group where the scheduler knows one."""
