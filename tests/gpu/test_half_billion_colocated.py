"""The job of half_billion_job with `placement: Colocated`: one process decodes, scores and trains in turn.

It tests memory: a sleeping role is in host memory, so the device never has engine and trainer at the same time.
"""

import pytest
from tests.gpu.local_jobs import HALF_BILLION_JOB, MISMATCH, SMALL_JOB, judge, run_job, write_files

from gpu_check.plugin import CheckedMachine, Figures


@pytest.mark.gpu(seconds=120, gigabytes=40)
def test_half_billion_colocated(machine: CheckedMachine, figures: Figures) -> None:
    """The same job in turns: decoding, scoring and training in one process."""
    sizes = machine.sized(SMALL_JOB, HALF_BILLION_JOB)
    spec = write_files(machine, sizes, figures) | {"placement": "Colocated", "inference": {"replicas": 0}}
    spec["training"] = {"microBatchSize": sizes.micro_batch}
    outcome = run_job(machine, figures, "half-billion-colocated", spec)
    judge(figures, outcome, spec, MISMATCH["BFloat16" if machine.cuda else "Float32"], "colocated")
    beside = machine.measured("half_billion_job", "shared device: peak_memory_gb")
    if outcome.peak_bytes and beside:
        peak = outcome.peak_bytes / 1e9
        less = f"{peak:.1f} GB against {beside:.1f} GB"
        figures.check("turns need less memory than all at once", peak < beside, less)
