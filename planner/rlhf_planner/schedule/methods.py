"""Which schedules a training job may choose from, where they place stages, and which one is the fastest.

Kept apart from the search, so that a process that only chooses loads no solver. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.serial import METHOD as SERIAL

FUSED: Final = "fused"
FUSED_SPLIT: Final = "fused-split"
CANDIDATES: Final = {"Fused": (FUSED,), "FusedSplit": (FUSED_SPLIT,), "Auto": (FUSED, FUSED_SPLIT)}
"""`fusion.intraStage.mode` -> methods of the tables that are looked for, besides the serial one."""
METHODS: Final = (SERIAL, FUSED, FUSED_SPLIT)
"""In the order of their number in the metric `training/schedule`."""
MIN_GAIN: Final = 0.01
"""A mini-batch must be shorter than the serial one by this share: less is noise."""


def placed(
    tensors: Mapping[str, int], ranks: int, microbatches: int, *, alternate: bool = False
) -> tuple[Pipeline, ...]:
    """Return one pipeline per model over `ranks` ranks of a block, of whose layers `tensors` says over how many ranks
    they are split: powers of two that divide `ranks`. A row is of as many ranks as the smallest. `alternate`: every
    second pipeline is in the opposite direction."""
    row = min(tensors.values())
    pipelines = []
    for index, (model, tensor) in enumerate(tensors.items()):
        firsts = tuple(range(0, ranks // row, tensor // row))
        places = firsts[::-1] if alternate and index % 2 else firsts
        one = Pipeline(name=model, model=model, stage_ranks=places, microbatches=microbatches, width=tensor // row)
        pipelines.append(one)
    return tuple(pipelines)


def opposite(models: Sequence[str], stages: int, microbatches: int) -> tuple[Pipeline, ...]:
    """Return one pipeline per model, every second one in the opposite direction: its stage s is on rank stages - 1 -
    s."""
    return placed(dict.fromkeys(models, 1), stages, microbatches, alternate=True)


def pick(seconds: Mapping[str, float]) -> str:
    """Return the method with the shortest mini-batch (`seconds` by method); the serial one unless another is shorter
    by MIN_GAIN."""
    best = min(sorted(seconds), key=lambda method: seconds[method])
    if SERIAL in seconds and seconds[best] > (1 - MIN_GAIN) * seconds[SERIAL]:
        return SERIAL
    return best
