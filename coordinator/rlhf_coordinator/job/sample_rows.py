"""The rows of an iteration's sample table, made from its ledger when it closes.

Rule: read only. A number that nobody gave is None and never zero; what an earlier coordinator knew alone is empty.
"""

import math

import numpy as np

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.reports.sample_table import SampleRow, cut_text
from rlhf_coordinator.state.sample import Sample
from rlhf_coordinator.storage.sample_codec import unpacked


def record_samples(run: JobRun) -> None:
    """Hand the table of the iteration that ends to the trackers, where it has one."""
    spec, iteration = run.context.spec, run.state.iteration
    if not spec.samples.due(iteration, spec.iterations):
        return
    ours = run.state.ledger.trainable
    chosen = [ours[at].index for at in spec.samples.chosen(len(ours))]
    trained = [sample.index for sample, _ in run.state.ledger.batch() if not sample.greedy]
    places = {index: place for place, index in enumerate(trained)}
    run.trackers.samples(iteration, [sample_row(run, index, places.get(index)) for index in chosen])


def sample_row(run: JobRun, index: int, place: int | None) -> SampleRow:
    """Return the row of one sample of the iteration in progress, which has this place in the batch, or none."""
    ledger, prompts, graph = run.state.ledger, run.prompts, run.context.graph
    sample = ledger.samples[index]
    prompt = prompts.of(*sample.origin)
    shown = next(iter(graph.reward_fields), None)
    reward = None if shown is None else sample_number(sample, shown)
    advantage = run.advantages[place] if place is not None and place < len(run.advantages) else math.nan
    parts = {field.value: sample_number(sample, field) for field in graph.reward_fields}
    for metrics in sample.reward_metrics.values():
        parts |= {name: value for name, value in metrics.items() if math.isfinite(value)}
    return SampleRow(
        iteration=ledger.iteration,
        sample=index,
        group=prompts.group(index),
        line=prompt.line,
        prompt=cut_text(prompt.text),
        response=cut_text(sample.text),
        response_tokens=len(sample.response),
        finish_reason=sample.finish_reason,
        reward=reward,
        rewards={name: value for name, value in parts.items() if value is not None},
        advantage=advantage if math.isfinite(advantage) else None,
        abstained=sample.abstained,
        failed=sample.failed,
        workers=tuple(sample.decoded_by),
        weight_versions=tuple((span.version, span.tokens) for span in sample.response.versions),
        drafted_tokens=sample.drafted_tokens,
        accepted_tokens=sample.accepted_tokens,
        migrated=len(sample.decoded_by) > 1,
        cut=len(cut_text(prompt.text)) < len(prompt.text) or len(cut_text(sample.text)) < len(sample.text),
    )


def sample_advantages(run: JobRun) -> pb.Array | None:
    """Return the advantages that the first rank computed in the iteration that was trained; None when it has none, or
    not one for each sample."""
    result = run.state.fleet.ranks()[0].last_train
    if result is None or result.iteration != run.state.iteration or not result.HasField("advantages"):
        return None
    return result.advantages


def advantage_numbers(advantages: pb.Array | None) -> list[float]:
    """Return the numbers of an array of advantages, by sample."""
    if advantages is None or not advantages.data:
        return []
    return [float(value) for value in np.frombuffer(unpacked(advantages, "float32"), dtype="<f4")]


def sample_number(sample: Sample, field: str) -> float | None:
    """Return the first number of a field of a sample; None: it has none that is finite."""
    if field not in sample.fields:
        return None
    value = float(np.frombuffer(sample.fields[field], dtype="<f4")[0])
    return value if math.isfinite(value) else None
