"""Random iterations and costs for property tests."""

from hypothesis import strategies as st

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.tail_placement import TailSample


@st.composite
def costs(draw: st.DrawFn) -> StageCosts:
    """Draw costs: flat or steep decoding, known or unknown bandwidth, limited KV memory, replays."""
    base = draw(st.floats(0.001, 0.1))
    row = draw(st.floats(0.0, 0.05))
    key = draw(st.floats(0.0, 1e-4))
    batch = draw(st.integers(1, 8))
    token = draw(st.floats(0.0, 0.01))
    return StageCosts.measured(
        decode=[StepTime(b, c, base + row * b + key * b * c) for b in {1, batch} for c in (8, 64)],
        max_batch_size=batch,
        prefill=[StepTime(1, 8, 0.01 + 8 * token / 10), StepTime(1, 64, 0.01 + 64 * token / 10)],
        tasks={"reward": [StepTime(1, 8, 8 * token), StepTime(4, 64, 256 * token)]},
        score_batch=draw(st.sampled_from((1, 16))),
        wake_seconds=draw(st.sampled_from((0.0, 0.5))),
        kv_bytes_per_token=draw(st.sampled_from((0.0, 100.0))),
        kv_room_bytes=draw(st.sampled_from((None, 20_000.0))),
        bandwidth=draw(st.sampled_from((None, 1e3, 1e6))),
        replays=draw(st.booleans()),
        padded=draw(st.booleans()),
    )


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[int], IterationSetup]:
    """Draw lengths and a layout: up to 40 samples on up to 6 generation and 2 inference workers."""
    size = draw(st.integers(1, 40))
    short, long = st.integers(1, 20), st.integers(1, 200)
    lengths = draw(st.lists(st.one_of(short, short, long), min_size=size, max_size=size))
    prompts = draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    workers, inference = draw(st.integers(1, 6)), draw(st.integers(0, 2))
    return lengths, IterationSetup(workers, inference, tuple(prompts), overlap=draw(st.booleans()))


@st.composite
def held_samples(draw: st.DrawFn, most: int = 8) -> dict[str, list[TailSample]]:
    """Draw the samples of 1 to 5 generation workers, up to `most` each."""
    names = [f"generation-{index}" for index in range(draw(st.integers(1, 5)))]
    sizes = [draw(st.integers(0, most)) for _ in names]
    sample = iter(draw(st.permutations(range(sum(sizes)))))
    return {
        name: [TailSample(next(sample), draw(st.integers(1, 50)), draw(st.integers(0, 100))) for _ in range(size)]
        for name, size in zip(names, sizes, strict=True)
    }
