"""Cuts by counts: the prompts that stay follow from whole responses, in any order of reports and after any kill."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.loop.sample_sets import BatchSamples
from rlhf_coordinator.scheduling import iteration, oversampling
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

SIBLINGS = 2
WORKERS = ("fast", "slow", "slower")
FAILS = 0
"""Drawn length of a sample that fails."""


def response(tokens: int) -> PackedResponse:
    return PackedResponse(b"\1\0\0\0" * tokens, b"\0\0\0\0" * tokens, (VersionSpan(0, tokens),) if tokens else ())


def begun(prompts: int, more: int) -> Ledger:
    return Ledger(0, prompts * SIBLINGS, (SCORE_REWARD,), 1, group_size=SIBLINGS, spare=more * SIBLINGS)


def by_definition(lengths: Sequence[int], batch: int) -> set[int]:
    """Return the prompts with the shortest longest response, by the definition on whole responses."""

    def longest(prompt: int) -> float:
        members = lengths[prompt * SIBLINGS : (prompt + 1) * SIBLINGS]
        return max(math.inf if length == FAILS else length for length in members)

    return set(sorted(range(len(lengths) // SIBLINGS), key=lambda prompt: (longest(prompt), prompt))[:batch])


class Reports:
    """Reports of workers about samples of known length, in any order."""

    def __init__(self, lengths: Sequence[int], more: int) -> None:
        self.lengths = lengths
        self.ledger = begun(len(lengths) // SIBLINGS, more)

    def decode(self, index: int, worker: str, tokens: int) -> None:
        """Decode some tokens of a sample, on this worker unless another has it."""
        sample, ledger = self.ledger.samples[index], self.ledger
        if self.lengths[index] == FAILS:
            if sample.state is SampleState.QUEUED:
                ledger.give_up(index)
            return
        if sample.state is SampleState.QUEUED:
            ledger.assign(index, worker)
        if sample.state is not SampleState.DECODING:
            return
        assert sample.decoding is not None
        lease, length = sample.decoding, len(sample.response)
        if length + tokens >= self.lengths[index]:
            ledger.finish(index, lease.attempt, lease.worker, response(self.lengths[index]), "stop", "")
        else:
            ledger.progress(index, lease.attempt, lease.worker, length, response(tokens))

    def remaining(self) -> set[int] | None:
        """Return the prompts that stay, or None while that is open."""
        decisions = oversampling.decide(self.ledger, "Counts").cuts
        if not decisions:
            return None
        return set(range(len(self.lengths) // SIBLINGS)) - set(decisions[0].groups)

    def restart(self) -> None:
        """Lose the tokens of unfinished responses, like a coordinator that starts again from its journal."""
        old, self.ledger = self.ledger, begun(len(self.lengths) // SIBLINGS, self.ledger.groups_to_cut)
        for sample in old.samples:
            if sample.failed:
                self.ledger.give_up(sample.index)
            elif not sample.unfinished:
                self.ledger.restore_response(sample.index, sample.response, "stop", "")


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw the lengths of 2 to 6 prompts, and how many prompts the batch has."""
    prompts = draw(st.integers(2, 6))
    size = prompts * SIBLINGS
    lengths = draw(st.lists(st.sampled_from((FAILS, 1, 2, 3, 3, 4, 9)), min_size=size, max_size=size))
    return lengths, draw(st.integers(1, prompts - 1))


@settings(max_examples=300, deadline=None)
@given(rounds(), st.data())
def test_neither_order_nor_pace_nor_a_kill_changes_the_prompts_that_stay(
    drawn: tuple[list[int], int], data: st.DataObject
) -> None:
    lengths, batch = drawn
    reports, expected = Reports(lengths, len(lengths) // SIBLINGS - batch), by_definition(lengths, batch)
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(("decode", "decode", "decode", "kill", "restart")),
                st.integers(0, len(lengths) - 1),
                st.sampled_from(WORKERS),
                st.integers(1, 4),
            ),
            max_size=60,
        )
    )
    rest = [("decode", index, WORKERS[0], 9) for index in data.draw(st.permutations(range(len(lengths))))]
    for kind, index, worker, tokens in [*steps, *rest]:
        if kind == "decode":
            reports.decode(index, worker, tokens)
        elif kind == "kill":
            reports.ledger.reclaim(worker)
        else:
            reports.restart()
        assert reports.remaining() in (None, expected)
    assert reports.remaining() == expected, "every response is whole"


def test_the_rule_decides_as_soon_as_the_others_are_longer() -> None:
    reports = Reports([2, 1, 9, 9, 3, 3], more=1)
    reports.decode(0, "fast", 9)
    reports.decode(1, "fast", 9)
    reports.decode(4, "fast", 9)
    assert oversampling.decide(reports.ledger, "Counts").awaited_tokens is None, "one prompt is finished"
    reports.decode(5, "slow", 9)
    reports.decode(2, "slow", 2)
    assert reports.remaining() is None
    assert oversampling.decide(reports.ledger, "Counts").awaited_tokens == 3
    reports.decode(2, "slow", 1)
    assert reports.remaining() is None, "as many tokens and an earlier number"
    reports.decode(2, "slow", 1)
    assert reports.remaining() == {0, 2}
    assert oversampling.decide(reports.ledger, "Clock").awaited_tokens is None


def test_as_many_tokens_and_a_later_number_is_enough() -> None:
    reports = Reports([3, 3, 9, 9], more=1)
    reports.decode(0, "fast", 9)
    reports.decode(1, "fast", 9)
    reports.decode(3, "fast", 3)
    assert reports.remaining() == {0}


@pytest.mark.parametrize(("cut_by", "woken"), [("Counts", True), ("Clock", False)])
def test_the_report_that_decides_wakes_the_coordinator(tmp_path: Path, cut_by: str, woken: bool) -> None:
    job = make_job(tmp_path, batch=1, rollout={"batchSize": 1, "oversample": 1, "cutBy": cut_by}, deterministic=False)
    run, restored = begin_in_process(tmp_path, job)
    resume_iteration(run, restored, Actions(run, CheckpointSaver(run)))
    ledger = run.state.ledger
    ledger.finish(0, ledger.assign(0, "fast"), "fast", response(3), "stop", "")
    lease = ledger.assign(1, "slow")
    run.scheduled = iteration.decide(run.context, run.state, 0.0)
    assert ledger.progress(1, lease, "slow", 0, response(2)) == 2
    assert not BatchSamples(run).decoded(1, 2)
    ledger.progress(1, lease, "slow", 2, response(1))
    assert BatchSamples(run).decoded(1, 1) is woken
