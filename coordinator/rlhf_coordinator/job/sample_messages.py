"""Checks of messages about samples, the same for the batch and for evaluations. Rule: pure.

Raises ValueError for an invalid message; `score_problem` returns the problem of a bad score.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from rlhf_api.algorithms import Task
from rlhf_common import control_pb2 as pb
from rlhf_common import reward_metrics
from rlhf_common.samples import FINISH_REASONS
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.sample_codec import response_of, unpacked

MAX_DRAFT_TOKENS: Final = 2**40
"""Most draft tokens that a message may report for a response."""


def progress_of(message: pb.SampleProgress, limit: int) -> PackedResponse:
    """Return the new tokens of an unfinished response of at most `limit` tokens. Raises ValueError."""
    more = response_of(message.tokens, message.log_probabilities, message.versions)
    if not 0 <= message.offset <= limit - len(more):
        raise ValueError(f"sample {message.key.sample} has {len(more)} tokens at {message.offset}, allowed are {limit}")
    return more


def finished_response(message: pb.FinishedSample, limit: int) -> PackedResponse:
    """Return the whole response, of at most `limit` tokens.

    Raises ValueError, also for an unknown finish reason or impossible counts of draft tokens.
    """
    response = response_of(message.tokens, message.log_probabilities, message.versions)
    if not 0 < len(response) <= limit:
        count = f"{len(response)} tokens, allowed are 1 to {limit}"
        raise ValueError(f"sample {message.key.sample} finished with {count}")
    if message.finish_reason not in FINISH_REASONS[1:]:
        reason = message.finish_reason[:20]
        raise ValueError(f"sample {message.key.sample} finished by {reason!r}, not by stop or length")
    for name, tokens in (("drafted", message.drafted_tokens), ("accepted", message.accepted_tokens)):
        if not 0 <= tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"sample {message.key.sample}: {name}_tokens is {tokens}, must be from 0 to 2^40")
    return response


def returned_response(progress: pb.SampleProgress, ledger: Ledger, index: int, limit: int) -> PackedResponse:
    """Return the whole unfinished response of at most `limit` tokens with which a worker returns a sample.

    Raises ValueError for another one.
    """
    name = f"sample {progress.key.sample}"
    response = response_of(progress.tokens, progress.log_probabilities, progress.versions)
    counted = sum(count for _, count in response.versions)
    if progress.offset or counted != len(response) or len(response) > limit:
        raise ValueError(f"{name} was given back with {len(response)} tokens at {progress.offset}, not as a whole")
    if not ledger.continued_by(index, response):
        raise ValueError(f"{name} has weight versions {response.versions}, wanted is {ledger.version}")
    return response


def task_named(tasks: Iterable[Task], name: str) -> Task:
    """Return the scoring task of this name. Raises ValueError when the job has none."""
    by_name = {task.name: task for task in tasks}
    if name not in by_name:
        raise ValueError(f"a score of task {name[:40]!r}; this job has {', '.join(by_name)}")
    return by_name[name]


def score_problem(message: pb.ScoredSample, task: Task, response_tokens: int) -> pb.Failure | None:
    """Return the reported failure, or the defect of the result; None for a good result."""
    if message.HasField("failure"):
        return message.failure
    if problem := reward_metrics.problem(message.metrics):
        return pb.Failure(reason="BadResult", message=problem)
    if message.abstained:
        if task.rewards:
            return None
        return pb.Failure(reason="BadResult", message=f"task {message.task} abstained; only a reward may")
    try:
        values = np.frombuffer(unpacked(message.result, "float32"), dtype="<f4")
    except ValueError as error:
        return pb.Failure(reason="BadResult", message=str(error))
    expected = task.produces[0].numbers(response_tokens)
    if len(values) != expected:
        return pb.Failure(reason="BadResult", message=f"{len(values)} numbers for {expected}")
    if not np.isfinite(values).all():
        return pb.Failure(reason="BadResult", message="the result holds numbers that are not finite")
    return None
