"""Rules that CEL cannot state, or not within the size of the definition: Python alone judges them.

Rule: `rlhf validate`, `rlhf run` and the operator (condition Planned) give them; the API server takes such a job. They
read a job whose fields are right. A job that runs already goes on, as with every rule that is new in a version.
"""

from collections.abc import Iterator

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.job_size import size_problems
from rlhf_api.rules.urls import url_problems
from rlhf_api.rules.user_code import code_problems


def refusals(job: RLHFJob) -> list[Problem]:
    """Return what stops a job."""
    return [problem for problem in _problems(job) if problem.severity is not Severity.WARNING]


def warnings(job: RLHFJob) -> list[Problem]:
    """Return what a job can be started with, and may not be meant."""
    return [problem for problem in _problems(job) if problem.severity is Severity.WARNING]


def _problems(job: RLHFJob) -> Iterator[Problem]:
    yield from code_problems(job.spec)
    yield from url_problems(job.spec)
    yield from size_problems(job.spec)
