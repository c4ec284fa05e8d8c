"""The order of samples in an epoch, its mini-batches, and their split over replicas and micro-batches.

Rule: the result depends on the manifest, the layout, the iteration, the epoch and the lengths, so ranks and replays
compute the same. Samples are split in order of length.

Source: RLHFuse (arXiv 2409.13221), balancing by length.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.failures import WorkError
from rlhf_workers.training.parallel.rank_layout import RankLayout

ORDER_STREAM: Final = 0x6F72646572
"""Number that separates this use of the seed from other ones (the bytes of "order")."""


def epoch_order(seed: int, iteration: int, epoch: int, samples: int, together: int = 1) -> list[int]:
    """Return a random order of samples 0 .. samples-1, the same for the same arguments on every machine; runs of
    `together` samples keep their order.

    Sorts raw Philox numbers, whose stream is stable between numpy's versions.
    """
    units = samples // together
    keys = np.random.Philox(np.random.SeedSequence([seed, ORDER_STREAM, iteration, epoch])).random_raw(units)
    order = sorted(range(units), key=lambda unit: (int(keys[unit]), unit))
    return [unit * together + place for unit in order for place in range(together)]


def mini_batches(order: Sequence[int], size: int) -> list[list[int]]:
    """Return consecutive runs of `size`. Raises ValueError if it does not divide the samples."""
    if len(order) % size:
        raise ValueError(f"miniBatchSize {size} does not divide the batch of {len(order)} samples")
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def split(
    samples: Sequence[int], lengths: Sequence[int], replicas: int, microbatches: int, together: int = 1
) -> list[list[list[int]]]:
    """Return [replica][micro-batch] -> samples of one mini-batch.

    Runs of `together` consecutive samples stay neighbours in one micro-batch. `lengths[sample]` counts prompt and
    response tokens. Raises ValueError if the micro-batches cannot have equal numbers of runs.
    """
    units = units_of(samples, replicas, microbatches, together)
    size = len(samples) // (replicas * microbatches)
    longest = {unit[0]: max(lengths[sample] for sample in unit) for unit in units}
    by_length = sorted(units, key=lambda unit: (-longest[unit[0]], unit[0]))
    ranked = [sample for unit in by_length for sample in unit]
    dealt = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    return shared_out(dealt, [size * longest[chosen[0]] for chosen in dealt], replicas)


def units_of(samples: Sequence[int], replicas: int, microbatches: int, together: int) -> list[list[int]]:
    """Return the runs of samples that stay together. Raises ValueError if the micro-batches cannot have equal numbers
    of them."""
    cells = replicas * microbatches
    if len(samples) % cells:
        raise ValueError(
            f"a mini-batch of {len(samples)} samples does not divide into {replicas} replicas x {microbatches} "
            f"micro-batches; miniBatchSize must be a multiple of {cells}"
        )
    size = len(samples) // cells
    if size % together:
        raise ValueError(f"micro-batches of {size} samples do not hold whole groups of {together} that stay together")
    return [list(samples[start : start + together]) for start in range(0, len(samples), together)]


def shared_out(microbatches: Sequence[list[int]], tokens: Sequence[int], replicas: int) -> list[list[list[int]]]:
    """Return the micro-batches of each replica, which come largest first: each goes to the replica with the fewest
    tokens that still needs one, and all get the same number.
    """
    shares: list[list[list[int]]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for microbatch, count in zip(microbatches, tokens, strict=True):
        wanting = [replica for replica in range(replicas) if len(shares[replica]) < len(microbatches) // replicas]
        replica = min(wanting, key=lambda candidate: (load[candidate], candidate))
        shares[replica].append(microbatch)
        load[replica] += count
    return shares


def check_mini_batch(spec: RLHFJobSpec, layout: RankLayout) -> None:
    """Raise WorkError if a job's mini-batch does not divide into the micro-batches of a layout's schedule."""
    size, field = spec.algorithm.fields.mini_batch_size, f"spec.algorithm.{spec.algorithm.name}.miniBatchSize"
    for model in layout.models:
        cells = layout.replicas(model) * layout.microbatches(model)
        if size % cells:
            why = f"{field}: {size} does not divide into the {cells} micro-batches of the {model}'s schedule"
            raise WorkError("BadSchedule", why, field=field)
