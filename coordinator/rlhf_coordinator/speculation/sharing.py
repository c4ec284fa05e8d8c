"""Carries out sharing: sends tokens of siblings and of earlier epochs, records what workers have, fills the store.

Must never change the ledger or the journal.
"""

import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import Final

from rlhf_api.algorithms import samples_per_prompt
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, is_ahead
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import sibling_sharing
from rlhf_coordinator.scheduling.decisions import SharedPart, ShareSiblings
from rlhf_coordinator.state.earlier_responses import EarlierResponse
from rlhf_coordinator.state.sample import ITEM_BYTES, Origin, SampleState
from rlhf_coordinator.state.sibling_state import TokenSource, weights
from rlhf_coordinator.storage.batch import responses_with_origins
from rlhf_coordinator.storage.sample_codec import packed

log = logging.getLogger(__name__)

MAX_SEGMENTS: Final = 8
"""Most segments of the journal that are read for responses at a start."""


def share(run: JobRun, decision: ShareSiblings) -> None:
    """Send the tokens of a decision, and record them."""
    sharing, messages = run.state.siblings, _Messages(run.state.iteration)
    for part in decision.parts:
        if part.sent:
            messages.add(part, *_tokens(run, part))
            sharing.sent += part.stop - part.start
            run.totals.siblings_sent += part.stop - part.start
        sharing.has.setdefault(part.group, {}).setdefault(part.worker, {})[part.source] = part.stop
    for group, worker in decision.forgotten:
        _drop(run, group, worker)
        messages.for_worker(worker).forgotten.append(group)
    for worker, message in messages.by_worker.items():
        run.sessions.send(worker, pb.CoordinatorMessage(siblings=message))
    sharing.next_group, sharing.next_share = decision.next_group, decision.next_share


def response_finished(run: JobRun, index: int, worker: str) -> None:
    """Record that the worker that finished a sample has all of its response, if it has tokens of the group."""
    group = index // samples_per_prompt(run.context.spec)
    has = run.state.siblings.has.get(group, {}).get(worker)
    if has is not None:
        has[TokenSource(run.state.iteration, index)] = len(run.state.ledger.samples[index].response)


def worker_lost(run: JobRun, worker: str) -> None:
    """Record that a worker has no tokens."""
    run.state.siblings.forget_worker(worker)


def iteration_ended(run: JobRun) -> None:
    """Forget what workers have, and store responses to prompts that come again or wait for a long round."""
    sharing = run.state.siblings
    for group, workers in list(sharing.has.items()):
        for worker in list(workers):
            _drop(run, group, worker)
    samples = run.state.ledger.samples
    responses = {sample.index: sample.response.tokens for sample in samples}
    cut = {sample.index for sample in samples if sample.state is SampleState.CUT}
    _ended(run, run.state.iteration, responses, {sample.index: sample.origin for sample in samples}, cut)


def restore_earlier(run: JobRun) -> None:
    """Fill the store with the responses in the newest MAX_SEGMENTS segments of earlier iterations.

    Nothing is stored unless the job drafts from siblings, and prompts repeat or rollout.keepCut is Drafts.
    """
    keeps_cut = run.context.spec.rollout.keep_cut == "Drafts"
    if not sibling_sharing.is_enabled(run.context) or not (keeps_cut or _prompts_come_again(run)):
        return
    before = [iteration for iteration in run.journal.iterations() if iteration < run.state.iteration]
    for iteration in before[-MAX_SEGMENTS:]:
        found = list(responses_with_origins(run.journal.read(iteration), samples_per_prompt(run.context.spec)))
        responses = {message.key.sample: message.tokens.data for message, _, _ in found}
        origins = {message.key.sample: origin for message, origin, _ in found}
        _ended(run, iteration, responses, origins, {message.key.sample for message, _, cut in found if cut})
    if restored := run.state.siblings.earlier.tokens:
        log.info("%d tokens of earlier responses are available as drafts", restored)


def _prompts_come_again(run: JobRun) -> bool:
    """Return whether the job's iterations go through the prompts of a source more than once."""
    return run.prompts.epoch(run.context.spec.iterations - 1) > 0


def _ended(
    run: JobRun, iteration: int, responses: Mapping[int, bytes], origins: Mapping[int, Origin], cut: Container[int]
) -> None:
    """Store the responses of an iteration if prompts come again, or else those that wait for a long round."""
    if not sibling_sharing.is_enabled(run.context):
        return
    if _prompts_come_again(run):
        _keep(run, iteration, responses, origins)
    elif run.context.spec.rollout.keep_cut == "Drafts":
        for index in responses:
            if index not in cut:
                run.state.siblings.earlier.remove(run.prompts.prompt(*origins[index]).line)
        _keep(run, iteration, {index: tokens for index, tokens in responses.items() if index in cut}, origins)


def _keep(run: JobRun, iteration: int, responses: Mapping[int, bytes], origins: Mapping[int, Origin]) -> None:
    by_line: defaultdict[int, list[EarlierResponse]] = defaultdict(list)
    for index, tokens in responses.items():
        if tokens:
            by_line[run.prompts.prompt(*origins[index]).line].append(EarlierResponse(iteration, index, tokens))
    for line, line_responses in by_line.items():
        run.state.siblings.earlier.add(line, line_responses)


def _drop(run: JobRun, group: int, worker: str) -> None:
    sharing, per_prompt = run.state.siblings, samples_per_prompt(run.context.spec)
    dropped = sibling_sharing.unsent_tokens(run.state, group, sharing.has[group][worker], per_prompt)
    sharing.forget(group, worker)
    sharing.dropped += dropped
    run.totals.siblings_dropped += dropped


def _tokens(run: JobRun, part: SharedPart) -> tuple[bytes, float]:
    """Return the tokens of a part, and their weight."""
    first, last = part.start * ITEM_BYTES, part.stop * ITEM_BYTES
    if is_ahead(part.source.sample):
        draft = run.state.ahead.current.response(part.source.sample - FIRST_AHEAD_SAMPLE)
        return draft.tokens[first:last], 1.0
    if part.source.iteration == run.state.iteration:
        return run.state.ledger.samples[part.source.sample].response.tokens[first:last], 1.0
    earlier = run.state.siblings.earlier.for_line(
        run.state.prompt_lines[part.group * samples_per_prompt(run.context.spec)]
    )
    response = next(item for item in earlier if (item.iteration, item.sample) == part.source)
    return response.tokens[first:last], weights(item.iteration for item in earlier)[response.iteration]


class _Messages:
    """One message for each worker that gets tokens or forgets them."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self.by_worker: dict[str, pb.SiblingTokens] = {}

    def for_worker(self, worker: str) -> pb.SiblingTokens:
        return self.by_worker.setdefault(worker, pb.SiblingTokens(iteration=self._iteration))

    def add(self, part: SharedPart, tokens: bytes, weight: float) -> None:
        self.for_worker(part.worker).deltas.append(
            pb.SiblingDelta(
                group=part.group,
                iteration=part.source.iteration,
                sample=part.source.sample,
                offset=part.start,
                tokens=packed("int32", tokens),
                weight=weight,
            )
        )
