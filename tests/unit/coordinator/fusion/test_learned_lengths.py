"""The planner learns the lengths of a sorted window together."""

from rlhf_coordinator.fusion.learned_lengths import learn_lengths
from rlhf_coordinator.state.fusion_state import FusionState
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.lengths import LengthModel

LIMIT, SAMPLES = 1000, 64


def state() -> FusionState:
    times = [StepTime(batch, keys, 0.01) for batch in (1, 8) for keys in (64, 512)]
    costs = StageCosts.measured(
        decode=times, prefill=times, tasks={}, max_batch_size=8, kv_bytes_per_token=1.0, bandwidth=1.0
    )
    return FusionState(costs, LengthModel.prior(LIMIT))


def batch(length: int) -> list[tuple[int, int, int]]:
    """Return the samples of a batch with like lengths."""
    return [(16, length + sample % 7, length + sample) for sample in range(SAMPLES)]


def test_the_batches_of_a_window_are_no_drift() -> None:
    together, alone = state(), state()
    for window in range(3):
        for place, length in enumerate((20, 400, 100)):
            learn_lengths(together, batch(length), ends=place == 2)
            learn_lengths(alone, batch(length), ends=True)
            assert not together.lengths.drifted
            assert len(together.lengths.window) == window + (place == 2)
            assert len(together.window) == (0 if place == 2 else SAMPLES * (place + 1))
    assert together.lengths.samples == 9 * SAMPLES
    assert alone.lengths.drifted, "one batch of a window differs from the one before"
