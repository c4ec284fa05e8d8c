"""The job of half_billion_job with `placement: Colocated`: one process decodes, scores and trains in turn.

Memory is the point: what sleeps is in host memory, so the device never holds what trains beside what decodes.
"""

from gpu_check.local_jobs import judge, manifest, run_job
from gpu_check.random_models import HALF_BILLION, TINY
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps.half_billion_job import MISMATCH, PolicyJobSizes, make_files, spec_of


def run(machine: CheckedMachine, sizes: PolicyJobSizes, report: Report) -> None:
    """Makes the model, runs the job, judges it, and compares its peak of memory with that of the shared device."""
    make_files(machine, sizes, report)
    spec = spec_of(machine, sizes) | {"placement": "Colocated"}
    spec["inference"] = {"replicas": 0}
    spec["training"] = {"microBatchSize": sizes.micro_batch}
    outcome = run_job(machine, report, manifest("half-billion-colocated", spec), machine.scratch)
    judge(report, outcome, spec, MISMATCH["BFloat16" if machine.cuda else "Float32"], "colocated")
    beside = machine.measured("half_billion_job", "shared device: peak_memory_gb")
    if outcome.peak_bytes and beside:
        peak = outcome.peak_bytes / 1e9
        report.check("turns need less memory than all at once", peak < beside, f"{peak:.1f} GB against {beside:.1f} GB")


STEP = CheckStep(
    "half_billion_colocated",
    "the same job in turns: decoding, scoring and training in one process",
    run,
    small=PolicyJobSizes(TINY, iterations=2, batch=16, response=16, micro_batch=4),
    gpu=PolicyJobSizes(HALF_BILLION, iterations=3, batch=64, response=128, micro_batch=16),
    limit_seconds=120,
    gpu_gigabytes=40,
)
