"""`spec.scheduling`, `spec.managedBy` and `spec.operatorClass`: what places the job's pods, and what reconciles it.

The operator (`rlhf_operator.gang`) decides which objects follow.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

ManagedBy = Literal["rlhf.dev/operator", "kueue.x-k8s.io/multikueue"]
OURS: Final = "rlhf.dev/operator"
"""The value of spec.managedBy for jobs that this operator reconciles."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Label with the name of the LocalQueue in which the job waits, the same for all jobs that Kueue admits."""
ELASTIC_ANNOTATION: Final = "kueue.x-k8s.io/elastic-job"
"""Annotation that lets a running job grow by a Workload slice if it is "true", the same for all jobs of Kueue."""

Name = Annotated[str, Field(max_length=SUBDOMAIN_MAX, pattern=SUBDOMAIN_FORM)]


OPERATOR_CLASS_MAX: Final = 49
"""Maximum characters: the Lease name `rlhf-operator-<class>` must fit in a DNS label."""
OperatorClass = Annotated[str, Field(max_length=OPERATOR_CLASS_MAX, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class Gang(ApiModel):
    """Gang scheduling: all pods that the job needs to start are placed together, or none."""

    mode: Literal["Auto", "Disabled", "Native", "Kueue", "Volcano", "Coscheduling"] = "Auto"
    """Auto is Kueue if the job has the label kueue.x-k8s.io/queue-name. Else it follows the scheduler of the pod
    templates: Volcano, Coscheduling, or Native (scheduling.k8s.io) with the default one, if available; else Disabled.
    """
    queue: Name | None = None
    """With Volcano: name of the Queue; unset: Volcano's default queue. Kueue reads the label kueue.x-k8s.io/queue-name
    instead."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """With Coscheduling: seconds that placed pods wait for the others before they release their nodes. Unset: the
    scheduler's default."""


class Scheduling(ApiModel):
    """Placement of the job's pods as a whole. Pod templates have node selectors, tolerations, affinity."""

    gang: Gang = Field(default_factory=Gang)
    """Gang scheduling."""
    priority_class_name: Name | None = None
    """PriorityClass of pods whose template names none, and of the pod group if the scheduler supports one. Unset: the
    cluster's default."""
