"""Job labels in queries of all families, and the name of a job in texts.

Rule: results of a query on jobs keep `cluster` (if a Prometheus has it), `namespace` and `rlhf_job`, never `pod` or
`instance`: a coordinator in a new pod is still the same job, and its alert continues.
"""

from typing import Final

JOB: Final = "cluster, namespace, rlhf_job"
"""Labels that identify a job."""
BY_JOB: Final = f"by ({JOB})"
ON_JOB: Final = f"on ({JOB})"


def unless_phase(*phases: str) -> str:
    """Return a PromQL clause that excludes jobs in one of these phases, from the operator's view."""
    return f'unless {ON_JOB} max {BY_JOB} (rlhf_job_phase{{phase=~"{"|".join(phases)}"}}) == 1'


ENDING_PHASES: Final = ("Queued", "Released", "Checkpointing", "Stopping")
"""Phases of jobs whose pods the operator lets end."""
UNLESS_ENDED: Final = unless_phase("Complete", "Failed", "Suspended")
"""Clause that excludes ended and suspended jobs."""
UNLESS_ENDING: Final = unless_phase(*ENDING_PHASES, "Complete", "Failed", "Suspended")
"""Clause that also excludes jobs whose pods the operator lets end."""
AT_WORK: Final = f"""\
and {ON_JOB} max {BY_JOB} (last_over_time(rlhf_iteration[5m]))
{UNLESS_ENDED}"""
"""Clause that excludes ended and suspended jobs, and jobs without `rlhf_iteration` in the last five minutes."""
WHO: Final = "{{ $labels.namespace }}/{{ $labels.rlhf_job }}"
"""Name of the job in a text."""
