"""The rows of an iteration's sample table, built from its ledger when it closes.

A missing reward or advantage is None.
"""

import math
from collections.abc import Sequence

import numpy as np

from rlhf_api.algorithms import Graph
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.reports.sample_table import SampleRow, cut_text
from rlhf_coordinator.state.sample import Sample
from rlhf_coordinator.storage.sample_codec import unpacked


def record_samples(run: JobRun) -> None:
    """Give the table of the iteration that ends to the trackers, if it has one."""
    spec, iteration = run.context.spec, run.state.iteration
    if not spec.samples.due(iteration, spec.iterations):
        return
    ours = run.state.ledger.trainable
    chosen = [ours[at].index for at in spec.samples.chosen(len(ours))]
    trained = [sample.index for sample, _ in run.state.ledger.batch() if not sample.greedy]
    places = {index: place for place, index in enumerate(trained)}
    run.trackers.samples(iteration, [sample_row(run, index, places.get(index)) for index in chosen])


def sample_row(run: JobRun, index: int, place: int | None) -> SampleRow:
    """Return the row of one sample of the iteration in progress. `place`: its place in the batch, None outside it."""
    ledger, prompts, graph = run.state.ledger, run.prompts, run.context.graph
    sample = ledger.samples[index]
    prompt = prompts.prompt(*sample.origin)
    shown = next(iter(graph.reward_fields), None)
    reward = None if shown is None else sample_number(sample, shown)
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
        shaped_reward=_at(run.shaped_rewards, place),
        rewards=rewards_by_name(sample, graph),
        advantage=_at(run.advantages, place),
        abstained=sample.abstained,
        failed=sample.failed,
        workers=tuple(sample.decoded_by),
        weight_versions=tuple((span.version, span.tokens) for span in sample.response.versions),
        drafted_tokens=sample.drafted_tokens,
        accepted_tokens=sample.accepted_tokens,
        migrated=len(sample.decoded_by) > 1,
        cut=len(cut_text(prompt.text)) < len(prompt.text) or len(cut_text(sample.text)) < len(sample.text),
    )


def rewards_by_name(sample: Sample, graph: Graph) -> dict[str, float]:
    """Return the finite rewards of a sample by name, with their finite extra values.

    With several rewards, an extra value has the name of its reward before it, such as `correct/length`.
    """
    fields = {field.value: field.value for field in graph.reward_fields} | graph.reward_parts
    rewards = {name: sample_number(sample, field) for name, field in fields.items()}
    numbers = {name: value for name, value in rewards.items() if value is not None}
    parts = {task.name: task.part for task in graph.tasks}
    for task, metrics in sample.reward_metrics.items():
        part = parts.get(task)
        prefix = f"{part.name}/" if part else ""
        numbers |= {f"{prefix}{name}": value for name, value in metrics.items() if math.isfinite(value)}
    return numbers


def _at(numbers: Sequence[float], place: int | None) -> float | None:
    """Return the number at a place of the batch; None where there is no finite one."""
    number = numbers[place] if place is not None and place < len(numbers) else math.nan
    return number if math.isfinite(number) else None


def copy_sample_numbers(run: JobRun, result: pb.TrainResult) -> None:
    """Copy the first rank's numbers of each trained sample into `result`; nothing where it has none."""
    last = run.state.fleet.ranks()[0].last_train
    if last is None or last.iteration != run.state.iteration:
        return
    if last.HasField("advantages"):
        result.advantages.CopyFrom(last.advantages)
    if last.HasField("shaped_rewards"):
        result.shaped_rewards.CopyFrom(last.shaped_rewards)


def numbers_by_sample(numbers: pb.Array | None) -> list[float]:
    """Return the values of a float32 array; empty without one. Raises ValueError for another type or shape."""
    if numbers is None or not numbers.data:
        return []
    return [float(value) for value in np.frombuffer(unpacked(numbers, "float32"), dtype="<f4")]


def sample_number(sample: Sample, field: str) -> float | None:
    """Return the first number in a field of a sample; None without a finite one."""
    if field not in sample.fields:
        return None
    value = float(np.frombuffer(sample.fields[field], dtype="<f4")[0])
    return value if math.isfinite(value) else None
