"""The twelve published instances of the fused schedule with the printed results of their search, as a reference.

Contains facts only. Source: RLHFuse (arXiv 2409.13221) and its published solver and traces.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_planner.schedule.instance import Instance, InstancePipeline


@dataclass(frozen=True, slots=True)
class Published:
    """One published instance; times are in units of the instance, peaks in its activation units, `search_seconds` on
    about 767 workers.
    """

    id: int
    large: tuple[int, int, float, float]  # stages, micro-batches, forward time, activation
    small: tuple[int, int, float, float]  # the same for each small pipeline
    serial: float  # serial 1F1B makespan
    greedy: tuple[float, float]  # makespan, peak activation
    best: float  # makespan of the published search
    peak: float  # its peak activation, the later and lower one if two were published
    bound: float  # published lower bound on the makespan
    split_bound: float  # max over devices of first + work, if weight-gradient steps may fill the tail
    search_seconds: float

    def instance(self, memory_cap: float | None = None, transfer: float = 0.0) -> Instance:
        """Return the instance: the large model forward over devices 0.., then small pipelines, each reversed on its own
        devices.
        """
        devices, small = self.large[0], self.small[0]
        pipelines = [_pipeline("actor", tuple(range(devices)), self.large, transfer)]
        for block in range(devices // small):
            on = tuple((block + 1) * small - 1 - stage for stage in range(small))
            pipelines.append(_pipeline(f"critic{block}", on, self.small, transfer))
        return Instance(devices, tuple(pipelines), memory_cap)


def _pipeline(name: str, on: tuple[int, ...], row: tuple[int, int, float, float], transfer: float) -> InstancePipeline:
    stages, microbatches, forward, activation = row
    return InstancePipeline(
        name=name,
        stage_devices=on,
        microbatches=microbatches,
        forward=(forward,) * stages,
        backward=(2 * forward,) * stages,
        weight_gradient=(forward,) * stages,
        activation=(activation,) * stages,
        transfer=(transfer,) * (stages - 1),
    )


PUBLISHED: tuple[Published, ...] = (
    Published(0, (8, 32, 5, 1.95), (4, 16, 4, 2.0), 813, (741, 42.90), 708, 19.70, 708, 684, 918),
    Published(1, (8, 16, 5, 1.95), (4, 8, 4, 2.0), 477, (425, 33.30), 372, 15.75, 372, 348, 473),
    Published(2, (8, 8, 5, 1.95), (4, 4, 4, 2.0), 309, (239, 23.60), 225, 15.60, 225, 180, 20),
    Published(3, (8, 32, 5, 1.95), (8, 32, 2, 1.0), 819, (755, 42.90), 702, 20.50, 702, 682, 4979),
    Published(4, (8, 16, 5, 1.95), (8, 16, 2, 1.0), 483, (419, 31.25), 366, 18.55, 366, 346, 1416),
    Published(5, (8, 8, 5, 1.95), (8, 8, 2, 1.0), 315, (225, 23.60), 225, 15.60, 225, 178, 167),
    Published(6, (16, 64, 2, 1.64), (8, 32, 2, 2.0), 708, (632, 75.44), 618, 39.72, 618, 590, 4042),
    Published(7, (16, 32, 2, 1.64), (8, 16, 2, 2.0), 420, (366, 58.48), 330, 29.88, 330, 302, 1075),
    Published(8, (16, 16, 2, 1.64), (8, 8, 2, 2.0), 276, (214, 42.24), 186, 26.24, 186, 158, 679),
    Published(9, (16, 64, 2, 1.64), (16, 64, 1, 1.0), 711, (651, 75.44), 613, 38.72, 606, 586, 3976),
    Published(10, (16, 32, 2, 1.64), (16, 32, 1, 1.0), 423, (363, 52.48), 318, 32.16, 318, 298, 1564),
    Published(11, (16, 16, 2, 1.64), (16, 16, 1, 1.0), 279, (219, 41.24), 186, 26.24, 186, 154, 249),
)
