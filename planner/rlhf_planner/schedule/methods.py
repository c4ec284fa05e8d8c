"""The schedules that a training job may choose from, their placement of stages, and the choice of the fastest.

Rule: pure. Must never import a solver.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.serial import METHOD as SERIAL

FUSED: Final = "fused"
FUSED_SPLIT: Final = "fused-split"
CANDIDATES: Final = {"Fused": (FUSED,), "FusedSplit": (FUSED_SPLIT,), "Auto": (FUSED, FUSED_SPLIT)}
"""`fusion.intraStage.mode` -> methods to search in addition to the serial one."""
METHODS: Final = (SERIAL, FUSED, FUSED_SPLIT)
"""Methods in the order of their number in the metric `training/schedule`."""
MIN_GAIN: Final = 0.01
"""Share by which a mini-batch must be shorter than the serial one; less is noise."""


def placed(
    tensors: Mapping[str, int], ranks: int, microbatches: int, *, alternate: bool = False
) -> tuple[Pipeline, ...]:
    """Return one pipeline per model over `ranks` ranks of a block.

    `tensors` gives the ranks that split a layer of each model: powers of two that divide `ranks`. A row has as many
    ranks as the smallest.
    """
    row = min(tensors.values())
    pipelines = []
    for index, (model, tensor) in enumerate(tensors.items()):
        firsts = tuple(range(0, ranks // row, tensor // row))
        places = firsts[::-1] if alternate and index % 2 else firsts
        pipeline = Pipeline(name=model, model=model, stage_ranks=places, microbatches=microbatches, width=tensor // row)
        pipelines.append(pipeline)
    return tuple(pipelines)


def opposite(models: Sequence[str], stages: int, microbatches: int) -> tuple[Pipeline, ...]:
    """Return one pipeline per model; every second one is reversed: its stage s is on rank stages - 1 - s."""
    return placed(dict.fromkeys(models, 1), stages, microbatches, alternate=True)


def pick(seconds: Mapping[str, float]) -> str:
    """Return the method with the shortest mini-batch, or the serial one unless another is shorter by MIN_GAIN.

    `seconds` is by method.
    """
    best = min(sorted(seconds), key=lambda method: seconds[method])
    if SERIAL in seconds and seconds[best] > (1 - MIN_GAIN) * seconds[SERIAL]:
        return SERIAL
    return best
