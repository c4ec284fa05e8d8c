"""Leases samples of the batch and of the evaluation to workers, for decoding and for scoring."""

from collections.abc import Iterable

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.sample_sets import BatchSamples, Samples, evaluation_samples
from rlhf_coordinator.scheduling.decisions import Generate, Score, ScoreGroup
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.sample_codec import generate_sample, score_sample


def generate(run: JobRun, decision: Generate) -> None:
    """Lease queued samples to a worker for decoding."""
    samples = _samples(run, evaluation=decision.evaluation)
    messages = [generation_message(run, samples, index, decision.worker) for index in decision.samples]
    command = pb.Command(generate=pb.Generate(samples=messages))
    detail = f"take {len(messages)} samples{samples.suffix}"
    send(run, decision.worker, command, PendingCommand(CommandKind.GENERATE, 0.0, detail))


def score(run: JobRun, decision: Score) -> None:
    """Lease finished samples to a worker for scoring."""
    samples = _samples(run, evaluation=decision.evaluation)
    messages = []
    for index, tasks in decision.samples:
        attempt = samples.ledger.assign_scores(index, tasks, decision.worker)
        samples.scoring_leased(index, decision.worker, tasks)
        messages.append(_score_sample(samples, index, attempt, tasks))
    _send_scores(run, samples, decision.worker, messages)


def score_group(run: JobRun, decision: ScoreGroup) -> None:
    """Lease a task of a prompt's group to a worker, with all samples of the group."""
    samples = BatchSamples(run)
    attempts = samples.ledger.assign_group(decision.group, decision.task, decision.worker)
    messages = [_score_sample(samples, index, attempt, (decision.task,)) for index, attempt in attempts.items()]
    _send_scores(run, samples, decision.worker, messages)


def _samples(run: JobRun, *, evaluation: bool) -> Samples:
    samples = evaluation_samples(run) if evaluation else BatchSamples(run)
    assert samples is not None
    return samples


def generation_message(run: JobRun, samples: Samples, index: int, worker: str) -> pb.GenerateSample:
    """Lease a queued sample to a worker; return the message about it."""
    sample, rollout = samples.ledger.samples[index], run.context.spec.rollout
    attempt = samples.ledger.assign(index, worker)
    samples.decoding_leased(index)
    prompt = samples.prompt(sample)
    return generate_sample(
        samples.key(index, attempt),
        prompt.tokens,
        sample.response,
        samples.random_key(sample),
        rollout.max_response_tokens,
        samples.drawing(sample),
        prompt.record if rollout.environment else "",
    )


def _score_sample(samples: Samples, index: int, attempt: int, tasks: tuple[str, ...]) -> pb.ScoreSample:
    sample = samples.ledger.samples[index]
    prompt = samples.prompt(sample)
    needs = {field for task in samples.tasks if task.name in tasks for field in task.needs}
    return score_sample(samples.key(index, attempt), tasks, prompt.tokens, prompt.text, prompt.record, sample, needs)


def _send_scores(run: JobRun, samples: Samples, worker: str, messages: Iterable[pb.ScoreSample]) -> None:
    command = pb.Command(score=pb.Score(samples=messages))
    detail = f"take {len(command.score.samples)} samples{samples.suffix} to score"
    send(run, worker, command, PendingCommand(CommandKind.SCORE, 0.0, detail))
    run.state.fleet.workers[worker].scorer_onloaded = True
