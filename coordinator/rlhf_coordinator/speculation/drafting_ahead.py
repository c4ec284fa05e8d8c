"""Carries out drafting ahead: leases drafts to idle workers, ends them, and records their tokens and what came of them.

Rule: nothing here changes ledger or journal. A message about an unknown or older draft changes nothing.
"""

import time

from rlhf_api.algorithms import has_greedy_baseline, samples_per_prompt
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, Drawing, Lease, SampleKey, is_ahead
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import finished_response, progress_of
from rlhf_coordinator.scheduling.decisions import DraftAhead, EndDrafts
from rlhf_coordinator.state.ahead_state import MAX_DRAFT_TOKENS, REST_SECONDS, AheadDraft, AheadDrafts
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.prompts import random_key
from rlhf_coordinator.storage.sample_codec import generate_sample, key_message


def lease(run: JobRun, decision: DraftAhead) -> None:
    """Lease drafts to a worker."""
    ahead, messages = run.state.ahead, []
    for index in decision.samples:
        ahead.attempts += 1
        draft = ahead.upcoming.begin(index, Lease(decision.worker, ahead.attempts))
        messages.append(_message(run, index, draft))
    ahead.since.setdefault(decision.worker, time.monotonic())
    command = pb.Command(generate=pb.Generate(samples=messages))
    detail = f"draft {len(messages)} samples ahead"
    send(run, decision.worker, command, PendingCommand(CommandKind.GENERATE, 0.0, detail))


def end(run: JobRun, decision: EndDrafts) -> None:
    """Withdraw a worker's drafts, and let it rest from drafting; those of a worker that is gone are lost."""
    ahead, name = run.state.ahead, decision.worker
    if not run.state.fleet.workers[name].connected:
        worker_lost(run, name)
        return
    keys = []
    for index in ahead.upcoming.on(name):
        ahead.upcoming.end(index, complete=False)
        keys.append(key_message(_key(ahead.upcoming.iteration, index, ahead.upcoming.drafts[index].attempt)))
    now = time.monotonic()
    _stopped(run, name, now)
    ahead.not_before[name] = now + REST_SECONDS
    if keys:
        order = pb.Command(withdraw=pb.Withdraw(keys=keys))
        send(run, name, order, PendingCommand(CommandKind.WITHDRAW, 0.0, f"end {len(keys)} drafts ahead"))


def worker_lost(run: JobRun, name: str) -> None:
    """End the leases of a lost or reconnecting worker; a draft that it had gets no further one."""
    for index in run.state.ahead.upcoming.on(name):
        run.state.ahead.upcoming.end(index, complete=True)
    _stopped(run, name, time.monotonic())


# ---------------------------------------------------------------- messages


def progressed(run: JobRun, message: pb.SampleProgress, more: PackedResponse) -> None:
    """Add new tokens of a draft. Raises ValueError for impossible weight versions."""
    _check(run, message.key, more)
    drafts, index = _find(run, message.key)
    if drafts is not None and message.offset <= len(response := drafts.response(index)):
        _take(run, drafts, index, response.with_tokens(message.offset, more))


def finished(run: JobRun, message: pb.FinishedSample) -> None:
    """Record that a draft is complete. Raises ValueError for an invalid message."""
    response = finished_response(message, run.context.spec.rollout.max_response_tokens)
    _check(run, message.key, response)
    drafts, index = _find(run, message.key)
    if drafts is not None:
        _take(run, drafts, index, response)
        _complete(run, drafts, index)


def failed(run: JobRun, message: pb.FailedSample) -> None:
    """Record that a worker could not decode a draft, which is not tried again."""
    drafts, index = _find(run, message.key)
    if drafts is not None:
        _complete(run, drafts, index)


def returned(run: JobRun, result: pb.WithdrawResult) -> None:
    """Take the tokens of withdrawn drafts. Raises ValueError for an invalid answer."""
    for item in result.samples:
        if is_ahead(item.key.sample):
            progressed(run, item, progress_of(item, run.context.spec.rollout.max_response_tokens))


def response_finished(run: JobRun, index: int) -> None:
    """Compare a finished sample of the batch with what was decoded ahead for it."""
    ledger, totals = run.state.ledger, run.totals
    compared, right = run.state.ahead.finished(index, ledger.samples[index].response.tokens, ledger.version)
    totals.ahead_compared += compared
    totals.ahead_right += right


def _check(run: JobRun, key: pb.SampleKey, response: PackedResponse) -> None:
    """Raise ValueError unless weight versions that exist drew all tokens."""
    versions, newest = response.versions, run.state.version
    if sum(span.tokens for span in versions) != len(response) or not all(0 <= v <= newest for v, _ in versions):
        name = f"sample {key.sample - FIRST_AHEAD_SAMPLE} of iteration {key.iteration}"
        raise ValueError(f"a draft of {name} has weight versions {versions}, the newest is {newest}")


def _find(run: JobRun, key: pb.SampleKey) -> tuple[AheadDrafts | None, int]:
    index = key.sample - FIRST_AHEAD_SAMPLE
    return run.state.ahead.find(key.iteration, index, key.attempt), index


def _take(run: JobRun, drafts: AheadDrafts, index: int, response: PackedResponse) -> None:
    more = drafts.take(index, response)
    run.state.ahead.drafted += more
    run.totals.ahead_drafted += more


def _complete(run: JobRun, drafts: AheadDrafts, index: int) -> None:
    lease = drafts.drafts[index].lease
    drafts.end(index, complete=True)
    if lease is not None and not run.state.ahead.upcoming.on(lease.worker):
        _stopped(run, lease.worker, time.monotonic())
    run.wake()


def _stopped(run: JobRun, name: str, now: float) -> None:
    """Count the seconds of a worker that drafts no more."""
    since = run.state.ahead.since.pop(name, None)
    if since is not None:
        run.state.ahead.seconds += now - since
        run.totals.ahead_seconds += now - since


def _key(iteration: int, index: int, attempt: int) -> SampleKey:
    return SampleKey(iteration, FIRST_AHEAD_SAMPLE + index, attempt)


def _message(run: JobRun, index: int, draft: AheadDraft) -> pb.GenerateSample:
    spec, iteration = run.context.spec, run.state.ahead.upcoming.iteration
    per_prompt = samples_per_prompt(spec)
    greedy = has_greedy_baseline(spec) and index % per_prompt == per_prompt - 1
    return generate_sample(
        _key(iteration, index, draft.attempt),
        run.prompts.prompt(iteration, index).tokens,
        draft.response,
        random_key(spec.seed, iteration, index),
        min(spec.rollout.max_response_tokens, MAX_DRAFT_TOKENS),
        Drawing.GREEDY if greedy else Drawing.ROLLOUT,
    )
