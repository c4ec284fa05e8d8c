"""Rules in Python only: CEL cannot state them, or not within the size limit of the definition.

The API server accepts a job that breaks them.
"""

from collections.abc import Iterator

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.devices import device_problems
from rlhf_api.rules.job_size import size_problems
from rlhf_api.rules.urls import url_problems
from rlhf_api.rules.user_code import code_problems


def refusals(job: RLHFJob) -> list[Problem]:
    """Return the problems that stop a job."""
    return [problem for problem in _problems(job) if problem.severity is not Severity.WARNING]


def warnings(job: RLHFJob) -> list[Problem]:
    """Return the problems with which a job can start, but which may be unintended."""
    return [problem for problem in _problems(job) if problem.severity is Severity.WARNING]


def _problems(job: RLHFJob) -> Iterator[Problem]:
    yield from code_problems(job.spec)
    yield from url_problems(job.spec)
    yield from size_problems(job.spec)
    yield from device_problems(job)
