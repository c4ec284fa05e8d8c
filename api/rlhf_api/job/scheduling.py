"""`spec.scheduling`, `spec.managedBy` and `spec.operatorClass`: who places the job's pods, and who reconciles it.

Rule: only what the user decides is here. What the cluster serves, and which objects follow, is decided by the operator
(`rlhf_operator.gang`).
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

ManagedBy = Literal["rlhf.dev/operator", "kueue.x-k8s.io/multikueue"]
OURS: Final = "rlhf.dev/operator"
"""The value of spec.managedBy under which this operator reconciles a job."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Label of a job that names the LocalQueue it waits in, as for every kind of job that Kueue admits."""
ELASTIC_ANNOTATION: Final = "kueue.x-k8s.io/elastic-job"
"""Annotation of a job that lets it grow by a Workload slice while it runs: "true", as for every kind of job."""

Name = Annotated[str, Field(max_length=SUBDOMAIN_MAX, pattern=SUBDOMAIN_FORM)]


OPERATOR_CLASS_MAX: Final = 49
"""Characters: `rlhf-operator-<class>`, the name of a Lease, stays within a DNS label."""
OperatorClass = Annotated[str, Field(max_length=OPERATOR_CLASS_MAX, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class Gang(ApiModel):
    """Gang scheduling: all pods that the job needs to start are placed together, or none."""

    mode: Literal["Auto", "Disabled", "Native", "Kueue", "Volcano", "Coscheduling"] = "Auto"
    """Auto is Kueue when the job has the label kueue.x-k8s.io/queue-name; else Volcano or Coscheduling when a pod
    template names their scheduler; else Native (scheduling.k8s.io) where it is served; else Disabled."""
    queue: Name | None = None
    """With Volcano: name of the Queue; unset is Volcano's default queue. Kueue reads the label
    kueue.x-k8s.io/queue-name instead."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """With Coscheduling: seconds that placed pods wait for the others before their nodes are given to other pods.
    Unset: the scheduler's own default."""


class Scheduling(ApiModel):
    """Placement of the job's pods as a whole; node selectors, tolerations and affinity are in pod templates."""

    gang: Gang = Field(default_factory=Gang)
    """Gang scheduling."""
    priority_class_name: Name | None = None
    """Name of the PriorityClass of every pod whose template names none, and of the pod group where the scheduler takes
    one. Unset: the cluster's default."""
