"""Actor and critic trained at the same time in opposite pipelines: the same bits as one after the other.

Gradients of every stage are added micro-batch by micro-batch in the same order with every table, including split
backwards. So weights, moments and metrics are bitwise equal; this file has no tolerance.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.fused_ranks import (
    assert_bitwise,
    assert_fused_and_split_train_the_bits_of_serial,
    fused_job,
    fused_table,
    train,
)
from tests.support.training.training_ranks import ThreadCommunicator, finish_folder, on_ranks, serial, trainer_of
from tests.support.training.training_roles import finish, role_of, trainer_in
from tests.support.workers.outbox import RecordedOutbox
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.failures import WorkError
from rlhf_workers.training.schedule.executor import execute
from rlhf_workers.training.schedule.step_timing import NoCommunicator, made_up_work, stage_row


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RLHFJob:
    return fused_job(tmp_path_factory.mktemp("models"))


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (2, 2)])
def test_fused_and_split_train_the_same_bits_as_serial(pipeline: int, data: int, job: RLHFJob) -> None:
    assert_fused_and_split_train_the_bits_of_serial(job, pipeline, data)


@pytest.mark.full
def test_a_fused_group_that_starts_again_from_its_checkpoint_ends_with_the_bits_of_serial(
    job: RLHFJob, tmp_path: Path
) -> None:
    """A lost rank ends its group: the group returns with the same table, from critic stages written by the opposite
    ranks."""
    table = fused_table(job, 2, 1, FUSED_SPLIT)
    train(job, table, 1, range(1), save=tmp_path)
    assert job.spec.models.critic is not None
    finish_folder(tmp_path, Path(job.spec.models.actor.path), Path(job.spec.models.critic.path))
    resumed = train(job, table, 1, range(1, 2), restore=str(tmp_path))
    straight = train(job, serial(job, 2, 1), 1, range(2))
    assert_bitwise(resumed, [(trainer, metrics[1:]) for trainer, metrics in straight])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch says nothing of its types
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
        return func(*args, **(kwargs or {}))


def test_a_split_backward_computes_no_matrix_product_twice(job: RLHFJob) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> dict[tuple[int, int], list[int]]:
        trainer = trainer_of(job, serial(job, 2, 1), rank, 2, peers)
        works = made_up_work(trainer)
        counts: dict[tuple[int, int], list[int]] = {}
        for index, stage_work in works.items():
            for stage in stage_work.local_stages:
                execute(stage_row(index, stage, 2, "B"), works, NoCommunicator(), 0)  # fills what is kept for positions
                for backward in (("B",), ("I", "W")):
                    with Products() as products:
                        execute(stage_row(index, stage, 2, *backward), works, NoCommunicator(), 0)
                    counts.setdefault((index, stage), []).append(products.count)
        return counts

    for counts in on_ranks(2, work):
        assert len(counts) == 2
        for whole, split in counts.values():
            assert whole == split > 0


def test_a_train_may_bring_another_table_of_the_same_placement_only(job: RLHFJob) -> None:
    fused, other = fused_table(job, 2, 1, FUSED), serial(job, 2, 1)
    folder = Path(job.spec.models.actor.path)
    changes: dict[str, Any] = {
        name: getattr(job.spec, name).model_dump(by_alias=True, exclude_none=True)
        for name in ("algorithm", "training", "rollout")
    }

    def work(rank: int, peers: ThreadCommunicator) -> str:
        outbox = RecordedOutbox()
        role = role_of(folder, peers, rank, table=serial_table(fused.pipelines), **changes)
        role.handle(pb.Command(id=1, measure=pb.Measure(measurement_id=3)), outbox)
        finish(role, outbox)
        assert outbox.answers.pop().measure.measurement_id == 3
        order = pb.Train(iteration=0, schedule=fused.model_dump_json())
        role.handle(pb.Command(id=2, train=order), outbox)
        finish(role, outbox)
        assert outbox.answers[0].train.metrics["bubble_seconds"] > 0
        assert "train/step" in outbox.spans
        with pytest.raises(WorkError, match="places its stages otherwise"):
            role.handle(pb.Command(id=3, train=pb.Train(iteration=1, schedule=other.model_dump_json())), outbox)
        return trainer_in(role).layout.table.method

    assert on_ranks(2, work) == [FUSED, FUSED]
