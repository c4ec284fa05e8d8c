"""Counts the tokens of a step of vLLM's core for the engine's report.

Rule: a sample with one token, apart from its draft, is decoding; several are prefill.
"""

from collections.abc import Mapping

from rlhf_workers.generation.engine import Prefill, StepReport
from rlhf_workers.generation.vllm_engine.core import CoreStep
from rlhf_workers.generation.vllm_engine.held_sample import HeldSample


def count(step: CoreStep, samples: Mapping[str, HeldSample], report: StepReport) -> None:
    """Add a step's counts for these samples to the report, before its drawn tokens are added to them."""
    ran = {name: tokens - len(step.drafts.get(name, ())) for name, tokens in step.scheduled.items() if name in samples}
    prefilled = {name: tokens for name, tokens in ran.items() if tokens > 1}
    report.prefilled = sum(prefilled.values())
    if prefilled:
        resumed = all(samples[name].length for name in prefilled)
        report.prefills.append(Prefill(len(prefilled), report.prefilled, resumed))
    decoded = [name for name in ran if name not in prefilled]
    report.rows = len(decoded)
    report.positions = sum(len(samples[name].sequence) for name in decoded)
    report.keys = report.positions
    for name, drafted in step.drafts.items():
        if name in samples:
            report.keys += sum(len(samples[name].sequence) + ahead for ahead in range(1, len(drafted) + 1))
    report.passes = int(bool(step.scheduled))
    report.pass_rows = report.rows + sum(len(drafted) for drafted in step.drafts.values())
