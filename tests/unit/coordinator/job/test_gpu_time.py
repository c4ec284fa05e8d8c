"""GPU seconds: busy and idle add up to allocated time, and idle time has the cause of its phase."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.metrics.labels import IDLE_CAUSES
from rlhf_common.names import PHASES, Group
from rlhf_coordinator.job.gpu_time import GpuTime, Segment, attribute, cause_of

SEGMENTS = st.lists(
    st.builds(Segment, st.sampled_from(IDLE_CAUSES), st.floats(0, 1e4), st.booleans()), min_size=1, max_size=6
)


@given(segments=SEGMENTS, share=st.floats(0, 1))
def test_busy_and_idle_are_all_of_the_time(segments: list[Segment], share: float) -> None:
    total = sum(segment.seconds for segment in segments)
    idle = attribute(segments, share * total)
    assert sum(idle.values()) == pytest.approx((1 - share) * total, abs=1e-6)
    assert all(seconds >= 0 for seconds in idle.values())


@given(segments=SEGMENTS, share=st.floats(0, 1))
def test_a_phase_without_work_is_idle_before_one_with_work_is(segments: list[Segment], share: float) -> None:
    working = sum(segment.seconds for segment in segments if segment.works)
    idle = attribute(segments, share * working)
    without = sum(segment.seconds for segment in segments if not segment.works)
    assert sum(idle.values()) >= without - 1e-6


@pytest.mark.parametrize("group", [group for group in Group if group is not Group.COORDINATOR])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("tail", [True, False])
def test_every_cause_is_one_of_the_catalogue(phase: str, group: Group, tail: bool) -> None:
    assert cause_of(phase, group, tail=tail) in IDLE_CAUSES


def beat(time: GpuTime, group: Group, since: float, now: float, computed: float, **more: bool | int) -> None:
    settings = {"gpus": 1, "ranks": False, "tail": False, **more}
    time.beat(f"{group}-0", group, since, now, computed, **settings)  # type: ignore[arg-type]


def test_a_generation_worker_idles_while_others_train() -> None:
    time = GpuTime()
    time.enter("Generating", 0.0)
    time.enter("Training", 10.0)
    beat(time, Group.GENERATION, 0.0, 20.0, 8.0)
    assert time.busy == {Group.GENERATION: 8.0}
    assert time.idle == {(Group.GENERATION, "training"): 10.0, (Group.GENERATION, "tail"): 2.0}


def test_ranks_wait_for_generation_and_inference() -> None:
    time = GpuTime()
    time.enter("Generating", 0.0)
    time.enter("Scoring", 10.0)
    time.enter("Training", 12.0)
    beat(time, Group.TRAINING, 0.0, 11.0, 0.0)
    beat(time, Group.TRAINING, 11.0, 20.0, 8.0)
    assert time.busy == {Group.TRAINING: 8.0}
    assert time.idle == {(Group.TRAINING, "tail"): 10.0, (Group.TRAINING, "inference"): 2.0}


def test_a_colocated_worker_trains_too_and_its_turns_are_idle() -> None:
    time = GpuTime()
    time.enter("Training", 0.0)
    time.turned("generation-0", 1.5)
    beat(time, Group.GENERATION, 0.0, 10.0, 9.0, ranks=True, gpus=4)
    assert time.busy == {Group.GENERATION: 4 * 7.5}
    assert time.idle == {(Group.GENERATION, "training"): 4.0, (Group.GENERATION, "turn"): 6.0}


def test_phases_that_are_forgotten_lose_no_time() -> None:
    time = GpuTime()
    for number in range(1000):
        time.enter("Generating" if number % 2 else "Training", float(number))
    beat(time, Group.GENERATION, 0.0, 1000.0, 0.0)
    assert sum(time.idle.values()) == pytest.approx(1000.0)
