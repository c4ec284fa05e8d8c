"""The complete batch of an iteration as padded arrays, and micro-batches cut from it.

Rule: a batch is checked when it arrives; a sample without a field its algorithm needs is an error that names both,
never a zero. An abstained sample keeps its place (sizes are fixed) but its tokens are outside `mask`, so it is in no
sum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import SampleField, Shape
from rlhf_api.arrays import unpack
from rlhf_workers.failures import WorkError


@dataclass(frozen=True)
class TrainingBatch:
    """B samples, T response positions; CPU tensors, padding is zero and outside `mask`."""

    prompts: tuple[torch.Tensor, ...]
    """int64 [p] a sample."""
    responses: torch.Tensor
    """int64 [B, T]."""
    response_lengths: torch.Tensor
    """int64 [B]."""
    mask: torch.Tensor
    """bool [B, T]: trained response tokens; false throughout an abstained sample."""
    groups: torch.Tensor
    """int64 [B]: samples of one prompt share a number."""
    rewards: torch.Tensor
    """float32 [B]; 0 and not `valid` where abstained."""
    valid: torch.Tensor
    """bool [B]: false for abstained samples."""
    fields: dict[str, torch.Tensor]
    """Name -> float32 [B, T]."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        responses = self.response_lengths.tolist()
        return [len(prompt) + length for prompt, length in zip(self.prompts, responses, strict=True)]

    @property
    def tokens(self) -> int:
        """Response tokens that are trained on."""
        return int(self.mask.sum())

    def with_fields(self, **fields: torch.Tensor) -> "TrainingBatch":
        """Return the same batch with more per-token fields."""
        return replace(self, fields={**self.fields, **fields})


@dataclass(frozen=True)
class MicroBatch:
    """b samples right-padded to L tokens, and their n trained response tokens laid end to end."""

    tokens: torch.Tensor
    """int64 [b, L]."""
    positions: torch.Tensor
    """int64 [n]: place in [b * L] of the state *before* each trained token."""
    targets: torch.Tensor
    """int64 [n]: the token sampled there."""
    weights: dict[str, torch.Tensor]
    """Model role -> float32 [n]: weight of each token's loss in the whole mini-batch."""
    fields: dict[str, torch.Tensor]
    """Name -> float32 [n]."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on another device."""
        return MicroBatch(
            self.tokens.to(device),
            self.positions.to(device),
            self.targets.to(device),
            {name: value.to(device) for name, value in self.weights.items()},
            {name: value.to(device) for name, value in self.fields.items()},
        )


def batch_from(samples: Iterable[pb.TrainSample], size: int, needed: Sequence[SampleField]) -> TrainingBatch:
    """Return a batch of `size` samples in sample order; every one that did not abstain has the `needed` fields.

    WorkError BatchIncomplete names the sample and the field.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample)
    if [sample.sample for sample in ordered] != list(range(size)):
        raise _incomplete(f"expected samples 0 to {size - 1} once each, got {len(ordered)} samples")
    responses = [_ints(sample, sample.response, "response") for sample in ordered]
    longest = max(len(response) for response in responses)
    fields: dict[str, torch.Tensor] = {
        name: torch.zeros(size, longest) for name in needed if name.shape is Shape.PER_TOKEN
    }
    judged = [name for name in needed if name.shape is Shape.PER_SAMPLE][:1]
    rewards, tokens = torch.zeros(size), torch.zeros(size, longest, dtype=torch.int64)
    for row, (sample, response) in enumerate(zip(ordered, responses, strict=True)):
        tokens[row, : len(response)] = response
        for name in fields:
            if not sample.abstained or name in sample.fields:
                fields[name][row, : len(response)] = _floats(sample, name, len(response))
        for name in judged if not sample.abstained else ():
            rewards[row] = _floats(sample, name, 1)[0]
    lengths = torch.tensor([len(response) for response in responses])
    valid = torch.tensor([not sample.abstained for sample in ordered])
    return TrainingBatch(
        prompts=tuple(_ints(sample, sample.prompt, "prompt") for sample in ordered),
        responses=tokens,
        response_lengths=lengths,
        mask=(torch.arange(longest)[None, :] < lengths[:, None]) & valid[:, None],
        groups=torch.tensor([sample.group for sample in ordered]),
        rewards=rewards,
        valid=valid,
        fields=fields,
    )


def micro_batch(batch: TrainingBatch, rows: Sequence[int], weights: dict[str, torch.Tensor]) -> MicroBatch:
    """Return the samples `rows` of a batch; `weights` are [B, T] per model role."""
    width = max(batch.lengths[row] for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    positions = []
    for place, row in enumerate(rows):
        prompt, length = batch.prompts[row], int(batch.response_lengths[row])
        tokens[place, : len(prompt)] = prompt
        tokens[place, len(prompt) : len(prompt) + length] = batch.responses[row, :length]
        if batch.valid[row]:
            positions.append(torch.arange(length) + (place * width + len(prompt) - 1))
    index = torch.tensor(list(rows))
    chosen = batch.mask[index]

    def flat(values: torch.Tensor) -> torch.Tensor:
        return values[index][chosen]

    return MicroBatch(
        tokens=tokens,
        positions=torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64),
        targets=flat(batch.responses),
        weights={model: flat(values) for model, values in weights.items()},
        fields={name: flat(values) for name, values in batch.fields.items()},
    )


def _ints(sample: pb.TrainSample, array: pb.Array, name: str) -> torch.Tensor:
    values = unpack(array)
    if values.ndim != 1 or not len(values) or values.dtype != np.int32:
        raise _incomplete(f"sample {sample.sample}: {name} is {array.dtype} {list(array.shape)}, needs int32 [n >= 1]")
    return torch.from_numpy(values).long()


def _floats(sample: pb.TrainSample, name: str, length: int) -> torch.Tensor:
    if name not in sample.fields:
        raise _incomplete(f"sample {sample.sample} has no {name}; it has {', '.join(sorted(sample.fields)) or 'none'}")
    values = unpack(sample.fields[name])
    if values.shape != (length,) or values.dtype != np.float32:
        raise _incomplete(
            f"sample {sample.sample}: {name} is {values.dtype} {list(values.shape)}, needs float32 [{length}]"
        )
    if not np.isfinite(values).all():
        raise _incomplete(f"sample {sample.sample}: {name} holds a value that is not a finite number")
    return torch.from_numpy(values)


def _incomplete(message: str) -> WorkError:
    return WorkError("BatchIncomplete", f"training batch: {message}")
