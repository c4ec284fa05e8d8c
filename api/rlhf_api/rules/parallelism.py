"""Rules of `spec.generation.gpusPerReplica` and `spec.generation.parallelism` for each engine."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.rule import Rule, Values

_GPUS: Final = "spec.generation.gpusPerReplica"
_TENSOR: Final = "spec.generation.parallelism.tensor"
_ENGINE: Final = "spec.generation.engine"
_DEGREES: Final = (1, 2, 4, 8, 16, 32, 64)


def of_parallelism() -> Iterator[Rule]:
    """Yield the rules of a generation worker's GPUs and tensor degree."""
    yield Rule(
        field=_TENSOR,
        node="spec",
        cel="self.generation.parallelism.tensor in [1, 2, 4, 8, 16, 32, 64]",
        holds=lambda values: values[_TENSOR] in _DEGREES,
        message="must be a power of two: use 1, 2, 4, 8, 16, 32 or 64",
    )
    yield Rule(
        field=_TENSOR,
        node="spec",
        cel="self.generation.engine != 'torch' || self.generation.parallelism.tensor == 1",
        holds=lambda values: values[_ENGINE] != "torch" or values[_TENSOR] == 1,
        message="must be 1 with engine torch, which holds the whole model on one device: use 1 and more replicas",
    )
    yield Rule(
        field=_GPUS,
        node="spec",
        cel="self.generation.engine != 'torch' || self.generation.gpusPerReplica <= 1",
        holds=lambda values: values[_ENGINE] != "torch" or values[_GPUS] <= 1,
        message="must be 0 or 1 with engine torch, whose worker uses one device: use 1 and more replicas",
    )
    yield Rule(
        field=_GPUS,
        node="spec",
        cel=(
            "!(self.generation.engine in ['vllm', 'Auto'])"
            " || self.generation.gpusPerReplica in [0, self.generation.parallelism.tensor]"
        ),
        holds=lambda values: values[_ENGINE] not in ("vllm", "Auto") or values[_GPUS] in (0, values[_TENSOR]),
        message=(
            f"must be {_TENSOR}, over which a worker splits its layers, or 0, which is CPU: use the same number of both"
        ),
    )
    yield _one_device()


def _one_device() -> Rule:
    """Return the rule that a worker with a training rank has at most one GPU."""

    def holds(values: Values) -> bool:
        return bool(values["spec.placement"] != "Colocated" or values[_GPUS] <= 1)

    return Rule(
        field=_GPUS,
        node="spec",
        cel="self.placement != 'Colocated' || self.generation.gpusPerReplica <= 1",
        holds=holds,
        message=(
            "must be 0 or 1 with spec.placement Colocated, as a rank trains on one device: use Dedicated, or 1 and "
            "more replicas"
        ),
    )
