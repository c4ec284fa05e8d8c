"""Says why vLLM is not checked: its size."""

from gpu_check.step import CheckedMachine, CheckStep, NotHereError, Report


def run(machine: CheckedMachine, sizes: None, report: Report) -> None:
    """Says why."""
    raise NotHereError("the wheel of vLLM alone is several hundred megabytes, and a bare machine takes 64 MiB in all")


STEP = CheckStep("vllm", "vLLM as the engine", run, small=None, gpu=None, limit_seconds=10)
