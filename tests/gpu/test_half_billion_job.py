"""A whole PPO job with a generated policy of half a billion parameters: every group on one device at once.

The critic starts from the policy with a new value head, and the reference has the policy's first weights, so one folder
is read three times. bfloat16 products and float32 master weights, as in a job with GPUs.
"""

import pytest
from tests.gpu.local_jobs import HALF_BILLION_JOB, MISMATCH, SMALL_JOB, judge, run_job, write_files

from gpu_check.plugin import CheckedMachine, Figures


@pytest.mark.gpu(seconds=120, gigabytes=40)
def test_half_billion_job(machine: CheckedMachine, figures: Figures) -> None:
    """A whole PPO job with a policy of 0.5 billion parameters, all groups on one GPU at once."""
    spec = write_files(machine, machine.sized(SMALL_JOB, HALF_BILLION_JOB), figures)
    outcome = run_job(machine, figures, "half-billion", spec)
    judge(figures, outcome, spec, MISMATCH["BFloat16" if machine.cuda else "Float32"], "shared device")
