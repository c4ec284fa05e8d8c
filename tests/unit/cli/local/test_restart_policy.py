"""When a process of a local run restarts, and when the job ends instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_cli.local.restart_policy import (
    FIRST_DELAY_SECONDS,
    HEALTHY_SECONDS,
    LAST_DELAY_SECONDS,
    VERDICTS,
    EndJob,
    ProcessDone,
    ProcessEnd,
    RestartProcess,
    decide_after_end,
    restart_message,
)
from rlhf_common.names import ExitCode, Group

W, C = Group.GENERATION, Group.COORDINATOR


@pytest.mark.parametrize(
    ("ended", "decision"),
    [
        (ProcessEnd(W, 0, 5, 0, 0), ProcessDone()),
        (ProcessEnd(W, 1, 5, 0, 0), RestartProcess(0.2, 1, counted=True)),
        (ProcessEnd(W, 1, 5, 1, 1), RestartProcess(0.4, 2, counted=True)),
        (ProcessEnd(W, -9, 5, 2, 2), RestartProcess(0.8, 3, counted=True)),
        (ProcessEnd(W, 1, 5, 30, 2), RestartProcess(10.0, 31, counted=True)),
        (ProcessEnd(W, 1, HEALTHY_SECONDS, 30, 2), RestartProcess(0.2, 1, counted=True)),
        (ProcessEnd(W, 75, 5, 0, 3), RestartProcess(0.2, 1, counted=False)),
        (ProcessEnd(W, 20, 5, 0, 0), RestartProcess(0.2, 1, counted=True)),
        (ProcessEnd(C, 1, 5, 0, 0), RestartProcess(0.2, 1, counted=True)),
        (ProcessEnd(C, -9, 5, 0, 0), RestartProcess(0.2, 1, counted=True)),
        (ProcessEnd(C, 0, 5, 0, 3), EndJob(0, "the coordinator finished", workers_told=True)),
        (ProcessEnd(C, 21, 5, 0, 0), EndJob(21, "the coordinator ended with exit code 21")),
        (
            ProcessEnd(W, -9, 5, 0, 3),
            EndJob(
                1,
                "generation ended with signal 9 (killed, or out of memory) and all 3 restarts of "
                "spec.runPolicy.backoffLimit are used",
            ),
        ),
    ],
)
def test_table(ended: ProcessEnd, decision: object) -> None:
    assert decide_after_end(ended, backoff_limit=3) == decision


def test_while_stopping_the_coordinators_end_is_the_jobs() -> None:
    assert decide_after_end(ProcessEnd(C, 0, 1, 0, 0), 3, stopping=True) == EndJob(
        0, "the coordinator finished", workers_told=True
    )
    assert isinstance(decide_after_end(ProcessEnd(C, -9, 1, 0, 0), 3, stopping=True), EndJob)
    stopped = EndJob(130, "the coordinator ended with exit code 130", workers_told=True)
    assert decide_after_end(ProcessEnd(C, 130, 1, 0, 0), 3, stopping=True) == stopped
    while_starting = EndJob(130, "the coordinator ended with signal 15")
    assert decide_after_end(ProcessEnd(C, -15, 1, 0, 0), 3, stopping=True) == while_starting
    assert isinstance(decide_after_end(ProcessEnd(W, -9, 1, 0, 0), 3, stopping=True), RestartProcess)


codes = st.integers(-64, 255)
ends = st.builds(
    ProcessEnd,
    group=st.sampled_from(list(Group)),
    code=codes,
    seconds=st.floats(0, 1e6),
    streak=st.integers(0, 10_000),
    counted=st.integers(0, 1000),
)


@given(ends, st.integers(0, 1000))
def test_delays_are_bounded_and_the_limit_holds(ended: ProcessEnd, limit: int) -> None:
    decision = decide_after_end(ended, limit)
    if isinstance(decision, RestartProcess):
        assert FIRST_DELAY_SECONDS <= decision.delay <= LAST_DELAY_SECONDS
        assert decision.counted == (ended.code != ExitCode.RESTART)
        assert not decision.counted or ended.counted < limit
        assert ended.group is not C or ended.code not in VERDICTS
    if isinstance(decision, EndJob):
        assert (decision.code == 0) == (ended.code == 0)
    if isinstance(decision, ProcessDone):
        assert ended.code == 0
        assert ended.group is not C


@given(st.integers(0, 20), st.lists(codes.filter(bool), min_size=40, max_size=60))
def test_a_crash_loop_of_a_worker_always_ends_the_job_unless_it_asked_to_be_restarted(
    limit: int, exits: list[int]
) -> None:
    counted = streak = 0
    for code in exits:
        decision = decide_after_end(ProcessEnd(W, code, 1.0, streak, counted), limit)
        if isinstance(decision, EndJob):
            assert counted == limit
            return
        assert isinstance(decision, RestartProcess)
        counted += decision.counted
        streak = decision.streak
    assert counted <= limit
    assert counted == sum(code != ExitCode.RESTART for code in exits)


def test_a_restart_is_announced_with_its_count_where_it_counts() -> None:
    counted = RestartProcess(0.4, 2, counted=True)
    assert restart_message(counted, 1, 2, 3) == "ended with exit code 1, starts again in 0.4 s (restart 2 of 3)"
    requested = RestartProcess(0.2, 1, counted=False)
    assert restart_message(requested, 75, 2, 3) == "ended with exit code 75, starts again in 0.2 s"
