"""What went through the model in a step of vLLM's core, as a report of an engine says it.

Rule: a sample of which one token went through, or one and what was drafted for it, is decoding; several at once are
prefill, of its prompt or of what is computed again because it made room for others.
"""

from collections.abc import Mapping

from rlhf_workers.generation.engine import Prefill, StepReport
from rlhf_workers.generation.vllm_engine.core import CoreStep
from rlhf_workers.generation.vllm_engine.held_sample import HeldSample


def count(step: CoreStep, samples: Mapping[str, HeldSample], report: StepReport) -> None:
    """Write down what a step ran for these samples, before its tokens are theirs."""
    ran = {name: tokens - len(step.drafts.get(name, ())) for name, tokens in step.scheduled.items() if name in samples}
    prefilled = {name: tokens for name, tokens in ran.items() if tokens > 1}
    report.prefilled = sum(prefilled.values())
    if prefilled:
        resumed = all(samples[name].length for name in prefilled)
        report.prefills.append(Prefill(len(prefilled), report.prefilled, resumed))
    decoded = [name for name in ran if name not in prefilled]
    report.rows = len(decoded)
    report.positions = sum(len(samples[name].known) for name in decoded)
    report.keys = report.positions
    for name, drafted in step.drafts.items():
        if name in samples:
            report.keys += sum(len(samples[name].known) + ahead for ahead in range(1, len(drafted) + 1))
    report.passes = int(bool(step.scheduled))
    report.pass_rows = report.rows + sum(len(drafted) for drafted in step.drafts.values())
