"""How queries of all families tell jobs apart, and how texts name one.

Rule: results of a query keep `cluster` (where a Prometheus has it), `namespace` and `rlhf_job`, never `pod` or
`instance`: a coordinator that comes back in another pod is the same job, and its alert goes on.
"""

from typing import Final

JOB: Final = "cluster, namespace, rlhf_job"
"""Labels that tell a job from all others."""
BY_JOB: Final = f"by ({JOB})"
ON_JOB: Final = f"on ({JOB})"


def unless_phase(*phases: str) -> str:
    """Return what takes jobs away that are in one of these phases, as the operator sees them."""
    return f'unless {ON_JOB} max {BY_JOB} (rlhf_job_phase{{phase=~"{"|".join(phases)}"}}) == 1'


UNLESS_ENDED: Final = unless_phase("Complete", "Failed", "Suspended")
"""What takes jobs away that have ended: their coordinator may be there for minutes more, and its series with it."""
AT_WORK: Final = f"""\
and {ON_JOB} max {BY_JOB} (last_over_time(rlhf_iteration[5m]))
{UNLESS_ENDED}"""
"""And those whose coordinator has ended, as ranges of a query outlive their series; a restart is no end."""
WHO: Final = "{{ $labels.namespace }}/{{ $labels.rlhf_job }}"
"""The job, in a text."""
