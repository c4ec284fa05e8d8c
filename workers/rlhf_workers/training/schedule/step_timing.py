"""Measures pipeline steps on this rank: single stages, transfers, and whole mini-batches under given schedules.

Measurements use synthetic micro-batches, through the same executor as training.

Rule: they change no weights and no moments, and zero the gradients again. All ranks must measure at the same time.
"""

import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlhf_api.algorithms import Shape, same_prompt_samples
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import Action, Kind, ScheduleTable
from rlhf_workers.devices.device import device_sharers, free_memory
from rlhf_workers.devices.host_copies import wait_for
from rlhf_workers.models.precision import shared_casts
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.communication.communicator import RowCounts
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.schedule.executor import execute
from rlhf_workers.training.stages.stage_work import StageWork
from rlhf_workers.training.trainer import Trainer

REPEATS: Final = 5
"""Maximum timed runs of a stage, of which the shortest counts."""
STAGE_SECONDS: Final = 1.0
"""Seconds after which a slow stage is not repeated; it is timed at least once."""
TRANSFERS: Final = 8
"""Timed round trips between two neighbours."""
ROOM_SHARE: Final = 0.9
"""Share of the free device memory for activations; the rest is for temporary memory of kernels."""

Steps = Generator[None, None, None]


def measure(trainer: Trainer, command: pb.Measure) -> Generator[None, None, pb.MeasureResult]:
    """Run the measurements of a command, a bounded part per step of the iterator, and return the answer."""
    result = pb.MeasureResult(measurement_id=command.measurement_id, activation_room_bytes=_room(trainer))
    try:
        if command.schedules:
            yield from _measure_tables(trainer, command, result)
        else:
            yield from _measure_stages(trainer, result)
            _measure_transfers(trainer, result)
    finally:
        for optimizer in trainer.optimizers.values():
            optimizer.gradients.zero_()
    return result


def made_up_batch(trainer: Trainer) -> TrainingBatch:
    """Return one mini-batch of the job's shapes: every sample is half as long as the longest allowed one."""
    spec, size = trainer.spec, trainer.spec.algorithm.fields.mini_batch_size
    prompt, response = max(1, spec.rollout.max_prompt_tokens // 2), max(1, spec.rollout.max_response_tokens // 2)
    vocabulary = min(int(stage.config.vocab_size) for stage in trainer.stages.values())
    tokens = (torch.arange(size * (prompt + response)) % vocabulary).view(size, prompt + response)
    same = round(same_prompt_samples(spec))
    wave = _wave((size, response))
    sampled = (field for field in trainer.algorithm.context.graph.batch_fields if field.shape is Shape.PER_TOKEN)
    fields = (*sampled, *trainer.algorithm.prepared)
    return TrainingBatch(
        prompts=tuple(tokens[row // same * same, :prompt] for row in range(size)),
        responses=tokens[:, prompt:].contiguous(),
        response_lengths=torch.full((size,), response),
        mask=torch.ones(size, response, dtype=torch.bool),
        groups=torch.zeros(size, dtype=torch.int64),
        rewards=torch.zeros(size),
        valid=torch.ones(size, dtype=torch.bool),
        finished=torch.ones(size, dtype=torch.bool),
        fields=dict.fromkeys(fields, wave),
    )


def made_up_work(trainer: Trainer) -> dict[int, StageWork]:
    """Return `made_up_batch` as work of this rank's stages, with separate objectives."""
    batch = made_up_batch(trainer)
    rows = list(range(trainer.spec.algorithm.fields.mini_batch_size))
    plan = trainer.splitter.split(trainer.layout, rows, batch, bounded=False)
    return trainer.mini_batch(batch, plan, trainer.objectives())


def _wave(shape: Sequence[int]) -> torch.Tensor:
    """Return values between -1 and 1 without a random number; not constant, so that kernels cannot take short cuts."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32)).view(*shape)


def _room(trainer: Trainer) -> int:
    if trainer.device.type != "cuda":
        return 0
    # Of all groups; 1 if it was not set, then the ranks' own count is used.
    sharers = device_sharers(trainer.device)
    beside = 1 if sharers > 1 else trainer.communicator.transport.sharers
    return int(ROOM_SHARE * free_memory(trainer.device)) // beside


# ---------------------------------------------------------------- single stages


def _measure_stages(trainer: Trainer, result: pb.MeasureResult) -> Steps:
    work = made_up_work(trainer)
    done: set[tuple[str, int]] = set()
    trainer.barrier()
    for index, pipeline in enumerate(trainer.layout.table.pipelines):
        for stage in work[index].local_stages if index in work else ():
            if (pipeline.model, stage) in done or not trainer.layout.runs(index, stage):
                continue
            done.add((pipeline.model, stage))
            stages = len(pipeline.stage_ranks)
            measured = pb.StageTime(model=pipeline.model, stage=stage)
            measured.activation_bytes = activation_bytes(trainer, work, index, stage)
            run_stage(trainer, work, stage_row(index, stage, stages, "I", "W"))
            times: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}
            begun = time.monotonic()
            while len(times["B"]) < REPEATS and (
                not times["B"] or slowest_seconds(time.monotonic() - begun, trainer, pipeline.model) < STAGE_SECONDS
            ):
                for backward in (("B",), ("I", "W")):
                    for kind, seconds in run_stage(trainer, work, stage_row(index, stage, stages, *backward)).items():
                        times[kind].append(seconds)
                yield
            measured.forward, measured.backward = min(times["F"]), min(times["B"])
            measured.input_gradient = min(times["I"])
            measured.weight_gradient = min(times["W"])
            result.stages.append(measured)


def slowest_seconds(seconds: float, trainer: Trainer, model: str) -> float:
    """Return the maximum of `seconds` over the ranks that compute a stage of a model in step with this one: either all
    continue, or none.
    """
    layout = trainer.layout
    most = torch.tensor([seconds], dtype=torch.float64, device=trainer.device)
    # Groups of different sizes overlap up to a common multiple of ranks, so each pass carries the maximum one group
    # further.
    for _ in range(math.lcm(layout.expert, layout.context) // max(layout.expert, layout.context)):
        for group in (layout.tensor_group(model), layout.expert_group, layout.context_group):
            if len(group) > 1:
                trainer.communicator.all_reduce_max(most, group)
    return float(most)


def activation_bytes(trainer: Trainer, work: Mapping[int, StageWork], index: int, stage: int) -> int:
    """Return the bytes that a forward of one micro-batch keeps for its backward, without half-precision weights. A
    second forward saves the same storages of those again.
    """
    row = stage_row(index, stage, work[index].stages, "B")
    counter = _SavedBytes({p.untyped_storage().data_ptr() for p in work[index].parameters(stage)})
    with (
        shared_casts(trainer.device, trainer.compute),
        torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack),
    ):
        run_stage(trainer, work, row)
        counter.total = 0
        run_stage(trainer, work, row)
    return counter.total


def stage_row(pipeline: int, stage: int, stages: int, *backward: Kind) -> list[Action]:
    """Return all actions of one stage for micro-batch 0."""
    before: tuple[Kind, ...] = ("RECV_F", "F") if stage > 0 else ("F",)
    between: tuple[Kind, ...] = ("SEND_F", "RECV_B") if stage < stages - 1 else ()
    after: tuple[Kind, ...] = (backward[0], "SEND_B") if stage > 0 else (backward[0],)
    kinds: tuple[Kind, ...] = (*before, *between, *after, *backward[1:])
    return [
        Action(kind=kind, pipeline=pipeline, stage=stage, microbatch=0, peer=None if len(kind) == 1 else 0)
        for kind in kinds
    ]


def run_stage(trainer: Trainer, work: Mapping[int, StageWork], row: Sequence[Action]) -> dict[str, float]:
    """Run a row with synthetic input from other ranks; return kind of computation -> seconds."""
    measured = execute(row, work, NoCommunicator(), 0, trainer.device_timers)
    return {step.action.kind: (step.end_ns - step.start_ns) / 1e9 for step in measured if step.action.peer is None}


class NoCommunicator:
    """Stands in for absent peers: receives give a wave; sends are dropped, and other operations do nothing."""

    transport = GroupTransport("gloo")

    def send(self, tensor: torch.Tensor, peer: int) -> "Arrived":
        return Arrived()

    def receive(self, tensor: torch.Tensor, peer: int) -> "Arrived":
        tensor.copy_(_wave(tensor.shape))
        return Arrived()

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None: ...

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]
    ) -> None: ...


class Arrived:
    """A completed transfer."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


@dataclass
class _SavedBytes:
    """Counts bytes that forward steps keep for their backward, each storage once, without the `counted` ones
    (weights)."""

    counted: set[int]
    total: int = 0
    _kept: list[Any] = field(default_factory=list)  # keeps storages alive, so that no address is reused

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.counted:
            self.counted.add(storage.data_ptr())
            self._kept.append(storage)
            self.total += storage.nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


# ---------------------------------------------------------------- transfers


def _measure_transfers(trainer: Trainer, result: pb.MeasureResult) -> None:
    """Time round trips of one micro-batch's hidden states between neighbours of a block, the even pairs first."""
    layout = trainer.layout
    buffer = max((work.like_hidden(0) for work in made_up_work(trainer).values()), key=torch.numel).zero_()
    for first in (0, 1):
        trainer.barrier()
        for left in range(first, layout.rows - 1, 2):
            if layout.local not in (left, left + 1):
                continue
            other = layout.global_rank(layout.block, left + 1 if layout.local == left else left, layout.number)
            times = []
            for _ in range(TRANSFERS):
                begun = time.perf_counter()
                for sends in (True, False) if layout.local == left else (False, True):
                    post = trainer.communicator.send if sends else trainer.communicator.receive
                    post(buffer, other).wait()
                wait_for(trainer.device)
                times.append((time.perf_counter() - begun) / 2)
            result.transfers.append(pb.TransferTime(rank=left, peer=left + 1, seconds=statistics.median(times)))


# ---------------------------------------------------------------- whole mini-batches


def _measure_tables(trainer: Trainer, command: pb.Measure, result: pb.MeasureResult) -> Steps:
    """Time mini-batches under each schedule in rotation, so that a slow moment of the machine affects all alike."""
    tables = [ScheduleTable.model_validate_json(schedule) for schedule in command.schedules]
    work = made_up_work(trainer)
    times: list[list[float]] = [[] for _ in tables]
    for _ in range(command.rounds + 1):
        for table, seconds in zip(tables, times, strict=True):
            layout = trainer.layout.with_table(table)
            trainer.barrier()
            begun = time.perf_counter()
            with shared_casts(trainer.device, trainer.compute):
                trainer.execute(layout, work)
            seconds.append(time.perf_counter() - begun)
            yield
    result.tables.extend(pb.TableTime(seconds=seconds[1:]) for seconds in times)
