"""The complete batch of an iteration as padded arrays, and its micro-batches: padded or packed, with all positions of
their samples or only a rank's.

Rule: if a sample that did not abstain lacks a field that its algorithm needs, the error names both. An abstained sample
keeps its place, but its tokens are outside `mask`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_api.algorithms import SampleField, Shape
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import unpack
from rlhf_common.samples import FINISH_REASONS, NOT_SAMPLED
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.packed_rows import PackedRow, PromptTable, SamplePlace, packed_row, sample_places
from rlhf_workers.training.parallel.context_group import ContextCut, ContextGroup, OwnPlaces, padded

OLD_FIELD: Final = "old_log_probabilities"
"""Field of the training ranks' log-probabilities of the sampled tokens before the first step of the iteration, if the
job uses them; stale tokens may have the engine's.
"""
STALE_FIELD: Final = "stale"
"""Field that is 1 for tokens sampled with weights of an earlier version, else 0; absent if there are none."""
NO_PARTS: Final[Mapping[str, str]] = {}
"""Reward parts of a job with one reward."""


@dataclass(frozen=True)
class TrainingBatch:
    """B samples, T response positions; CPU tensors. Padding is zero and outside `mask`."""

    prompts: tuple[torch.Tensor, ...]
    """int64 [p] per sample."""
    responses: torch.Tensor
    """int64 [B, T]."""
    response_lengths: torch.Tensor
    """int64 [B]."""
    mask: torch.Tensor
    """bool [B, T]: trained response tokens; all false for a sample that is not `valid`."""
    groups: torch.Tensor
    """int64 [B]: prompt group number, the same for samples of one prompt."""
    rewards: torch.Tensor
    """float32 [B]; 0 for a sample that is not `valid`."""
    valid: torch.Tensor
    """bool [B]: false for samples that abstained, are filtered out, or lack their greedy baseline."""
    finished: torch.Tensor
    """bool [B]: whether the response ended by itself; false if it was cut at its length limit, left unfinished or is
    missing."""
    fields: dict[str, torch.Tensor]
    """Name -> float32 [B, T]."""
    judged: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> float32 [B], unshaped, for every needed field with one number per response."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of one of several rewards -> float32 [B], NaN for abstentions; empty with a single reward."""
    baselines: torch.Tensor | None = None
    """float32 [B]: reward of the prompt's greedy response, 0 if not `valid`; None if the algorithm has no greedy
    baseline."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens per sample, prompt and response."""
        responses = self.response_lengths.tolist()
        return [len(prompt) + length for prompt, length in zip(self.prompts, responses, strict=True)]

    @cached_property
    def prompt_table(self) -> PromptTable:
        """Which samples have equal prompts, and how long these are."""
        return PromptTable.from_prompts(self.prompts)

    @property
    def old(self) -> torch.Tensor:
        """Log-probabilities in the denominator of ratios, float32 [B, T]: the training ranks' if computed, else the
        engine's."""
        return _old(self.fields)

    @property
    def stale(self) -> torch.Tensor | None:
        """Tokens sampled with weights of an earlier version, bool [B, T]; None if there are none."""
        return _stale(self.fields)

    @property
    def tokens(self) -> int:
        """Number of trained response tokens."""
        return int(self.mask.sum())

    def sample_means(self, field: str) -> list[float]:
        """Return the mean of a field over each sample's trained tokens, NaN without any; empty if the batch has no such
        field."""
        if field not in self.fields:
            return []
        sums = (self.fields[field] * self.mask).sum(dim=1, dtype=torch.float64)
        means: list[float] = (sums / self.mask.sum(dim=1)).tolist()
        return means

    def with_fields(self, **fields: torch.Tensor) -> "TrainingBatch":
        """Return the same batch with more per-token fields."""
        return replace(self, fields={**self.fields, **fields})


@dataclass(frozen=True)
class MicroBatch:
    """b samples, right-padded to L tokens, or packed into one row of L tokens in total, and their n trained response
    tokens, concatenated.

    In a packed row several samples may share the tokens of one prompt. On a rank of a context group `tokens` has its
    own positions of the rows, [b, l], which `cut` and `own` describe; the other fields cover whole rows.
    """

    tokens: torch.Tensor
    """int64 [b, L]; packed [1, L]."""
    last: torch.Tensor
    """int64 [b]: index in the flattened rows of the last trained token of each sample; its first token without any."""
    positions: torch.Tensor
    """int64 [n]: index in the flattened rows of the state *before* each trained token. First tokens of responses to a
    shared prompt have the same one.
    """
    targets: torch.Tensor
    """int64 [n]: the token sampled there."""
    samples: torch.Tensor
    """int64 [n]: number (of b) of the sample of each trained token; a micro-batch contains whole responses."""
    weights: dict[str, torch.Tensor]
    """Model role -> float32 [n]: weight of each token's loss in the whole mini-batch."""
    fields: dict[str, torch.Tensor]
    """Name -> float32 [n]."""
    packed: PackedRow | None = None
    """Segments of a packed row; None: padded."""
    cut: ContextCut | None = None
    """This rank's positions of the rows; None: all."""
    own: OwnPlaces | None = None
    """The entries of `positions` on this rank; None: all."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on another device; for a GPU with copies for which the host does not wait."""
        return MicroBatch(
            _moved(self.tokens, device),
            _moved(self.last, device),
            _moved(self.positions, device),
            _moved(self.targets, device),
            _moved(self.samples, device),
            {name: _moved(value, device) for name, value in self.weights.items()},
            {name: _moved(value, device) for name, value in self.fields.items()},
            self.packed,
            None if self.cut is None else self.cut.moved(lambda tensor: _moved(tensor, device)),
            None if self.own is None else OwnPlaces(_moved(self.own.mine, device), _moved(self.own.places, device)),
        )

    @property
    def old(self) -> torch.Tensor:
        """Denominator of ratios, as in a batch, float32 [n]."""
        return _old(self.fields)

    @property
    def stale(self) -> torch.Tensor | None:
        """Stale tokens, as in a batch, bool [n]."""
        return _stale(self.fields)

    def sum_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] over the trained tokens of each sample, [b], differentiable; 0 without
        tokens."""
        return values.new_zeros(len(self.last)).index_add(0, self.samples, values)


def _old(fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return fields.get(OLD_FIELD, fields[SAMPLED_FIELD])


def _stale(fields: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    return None if STALE_FIELD not in fields else fields[STALE_FIELD] > 0


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return it on a device, for a GPU through pinned memory. For a copy from pageable memory the host would wait."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def batch_from(
    samples: Iterable[pb.TrainSample],
    size: int,
    needed: Sequence[SampleField],
    parts: Mapping[str, str] = NO_PARTS,
    holes: bool = False,
    version: int | None = None,
) -> TrainingBatch:
    """Return a batch of `size` samples in sample order. A sample that did not abstain needs a response and the fields
    in `needed`.

    `parts`: name of one of several rewards -> its field. `holes`: responses contain tokens of an environment,
    identified by their log-probability; they are outside `mask`. `version`: version of the trained weights, if tokens
    may be older. Raises WorkError BatchIncomplete, and ValueError for an array whose bytes do not match its shape.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample)
    if [sample.sample for sample in ordered] != list(range(size)):
        raise _incomplete(f"expected samples 0 to {size - 1} once each, got {len(ordered)} samples")
    responses = [_ints(sample, sample.response, "response", least=0 if sample.abstained else 1) for sample in ordered]
    longest = max(len(response) for response in responses)
    tokens = np.zeros((size, longest), np.int64)
    others = np.zeros((size, longest), np.bool_)
    per_token = [name for name in needed if name.shape is Shape.PER_TOKEN]
    per_sample = [name for name in needed if name.shape is Shape.PER_SAMPLE]
    filled = {
        name: np.zeros((size, longest if name in per_token else 1), np.float32) for name in per_token + per_sample
    }
    for row, (sample, response) in enumerate(zip(ordered, responses, strict=True)):
        length = len(response)
        tokens[row, :length] = response
        if holes:
            others[row, :length] = _written(sample, length)
        for name in per_token:
            if not sample.abstained or name in sample.fields:
                filled[name][row, :length] = _array(sample, name, length)
        for name in per_sample if not sample.abstained else ():
            filled[name][row] = _array(sample, name, 1)
    if holes:  # tokens of an environment have no log-probability
        filled[SAMPLED_FIELD][others] = 0
    fields, judged = ({name: _finite(name, filled[name]) for name in names} for names in (per_token, per_sample))
    rewards: dict[str, torch.Tensor] = {name: value.flatten() for name, value in judged.items()}
    lengths = torch.tensor([len(response) for response in responses])
    valid = torch.tensor([not sample.abstained for sample in ordered])
    return TrainingBatch(
        prompts=tuple(torch.from_numpy(_ints(sample, sample.prompt, "prompt").astype(np.int64)) for sample in ordered),
        responses=torch.from_numpy(tokens),
        response_lengths=lengths,
        mask=(torch.arange(longest)[None, :] < lengths[:, None]) & valid[:, None] & ~torch.from_numpy(others),
        groups=torch.tensor([sample.group for sample in ordered]),
        rewards=next(iter(rewards.values()), torch.zeros(size)),
        valid=valid,
        finished=torch.tensor([_finished(sample) for sample in ordered]),
        fields=fields | _staleness(ordered, longest, version),
        parts={part: torch.tensor([_part(sample, name) for sample in ordered]) for part, name in parts.items()},
        judged=rewards,
    )


def _staleness(samples: Sequence[pb.TrainSample], longest: int, version: int | None) -> dict[str, torch.Tensor]:
    """Return STALE_FIELD if any token is of an earlier version."""
    result = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples if version is not None else ()):
        place = 0
        for span in sample.versions:
            assert version is not None
            result[row, place : place + span.tokens] = float(span.version < version)
            place += span.tokens
    return {STALE_FIELD: result} if result.any() else {}


def _written(sample: pb.TrainSample, length: int) -> npt.NDArray[np.bool_]:
    """Return the tokens of a response that an environment wrote, [n]; all false for a failed or cut-off response
    without log-probabilities."""
    if sample.abstained and SAMPLED_FIELD not in sample.fields:
        return np.zeros(length, np.bool_)
    written: npt.NDArray[np.bool_] = _array(sample, SAMPLED_FIELD, length) == NOT_SAMPLED
    return written


def _part(sample: pb.TrainSample, name: str) -> float:
    if name not in sample.fields:
        return math.nan
    value = float(_array(sample, name, 1)[0])
    if not math.isfinite(value):
        raise _not_finite(sample.sample, name)
    return value


def micro_batch(
    batch: TrainingBatch,
    rows: Sequence[int],
    weights: dict[str, torch.Tensor],
    packed: bool = False,
    group: ContextGroup | None = None,
    prompts: PromptTable | None = None,
) -> MicroBatch:
    """Return the samples `rows` of a batch, in one row if `packed`; `weights` are [B, T] per model role.

    `group`: keep only this rank's positions; None: all. `prompts`: neighbours in a packed row with equal ones share
    them; None: every sample has its own.
    """
    lengths = [padded(length, 1 if group is None else group.chunks) for length in batch.lengths]
    row = packed_row(rows, lengths, prompts) if packed else None
    width = max(lengths[sample] for sample in rows)
    widths = [width] * len(rows) if row is None else [segment.tokens for segment in row]
    of_prompts = [len(batch.prompts[sample]) for sample in rows]
    if row is None:
        places = [SamplePlace(width * place, width * place + length) for place, length in enumerate(of_prompts)]
    else:
        places = list(sample_places(row, of_prompts))
    tokens, before, last = _placed(batch, rows, places, sum(widths))
    index = torch.tensor(list(rows))
    chosen = batch.mask[index]
    samples = torch.arange(len(rows))[:, None].expand_as(chosen)

    def flat(values: torch.Tensor) -> torch.Tensor:
        return values[index][chosen]

    tokens = tokens.view(1 if packed else len(rows), -1)
    cut = None if group is None else ContextCut.for_lengths(group, widths if packed else widths[:1])
    return MicroBatch(
        tokens=tokens if cut is None else tokens[:, cut.columns],
        last=last,
        positions=before,
        targets=flat(batch.responses),
        samples=samples[chosen],
        weights={model: flat(values) for model, values in weights.items()},
        fields={name: flat(values) for name, values in batch.fields.items()},
        packed=row,
        cut=cut,
        own=None if cut is None else cut.own(before),
    )


def _placed(
    batch: TrainingBatch, rows: Sequence[int], places: Sequence[SamplePlace], size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (flattened rows of `size` tokens, index of the state before each trained token [n], index of each sample's
    last trained token [b])."""
    tokens, last = torch.zeros(size, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
    before = list[torch.Tensor]()
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        prompt, length = batch.prompts[row], int(batch.response_lengths[row])
        prompt_end = place.prompt + len(prompt)
        tokens[place.prompt : prompt_end] = prompt
        tokens[place.response : place.response + length] = batch.responses[row, :length]
        trained = batch.mask[row, :length].nonzero().flatten()
        before.append(torch.where(trained == 0, prompt_end, trained + place.response) - 1)
        last[number] = trained[-1] + place.response if len(trained) else place.prompt
    return tokens, torch.cat(before), last


def _finished(sample: pb.TrainSample) -> bool:
    if sample.finish_reason not in FINISH_REASONS:
        wanted = ", ".join(FINISH_REASONS[1:])
        raise _incomplete(
            f"sample {sample.sample}: finish_reason is {sample.finish_reason[:20]!r}, not one of {wanted}"
        )
    return sample.finish_reason == "stop" and sample.response.shape[0] > 0


def _ints(sample: pb.TrainSample, array: pb.Array, name: str, least: int = 1) -> npt.NDArray[np.int32]:
    values: npt.NDArray[np.int32] = unpack(array)
    if values.ndim != 1 or len(values) < least or values.dtype != np.int32:
        needs = f"int32 [n >= {least}]"
        raise _incomplete(f"sample {sample.sample}: {name} is {array.dtype} {list(array.shape)}, needs {needs}")
    return values


def _array(sample: pb.TrainSample, name: str, length: int) -> npt.NDArray[np.float32]:
    if name not in sample.fields:
        raise _incomplete(f"sample {sample.sample} has no {name}; it has {', '.join(sorted(sample.fields)) or 'none'}")
    values: npt.NDArray[np.float32] = unpack(sample.fields[name])
    if values.shape != (length,) or values.dtype != np.float32:
        raise _incomplete(
            f"sample {sample.sample}: {name} is {values.dtype} {list(values.shape)}, needs float32 [{length}]"
        )
    return values


def _finite(name: str, values: npt.NDArray[np.float32]) -> torch.Tensor:
    """Return a field of all samples. Raises WorkError for the first sample with a value that is not finite."""
    right = np.isfinite(values)
    if not right.all():
        raise _not_finite(int(right.all(axis=1).argmin()), name)
    return torch.from_numpy(values)


def _not_finite(sample: int, name: str) -> WorkError:
    return _incomplete(f"sample {sample}: {name} holds a value that is not a finite number")


def _incomplete(message: str) -> WorkError:
    return WorkError("BatchIncomplete", f"training batch: {message}")
