"""Assignment of rows to ranks, and groups that cannot divide models."""

from pathlib import Path

import pytest
from tests.support.training.sharded_ranks import parallel
from tests.support.training.training_ranks import make_job, serial

from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import require_shards
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.parallel.sharded_stage import Part


@pytest.mark.parametrize(
    ("ranks", "backend", "transport", "says"),
    [
        (4, "torch", GroupTransport("gloo"), "2 needs backend torch and 2 ranks of one pipeline stage"),
        (2, "megatron", GroupTransport("nccl"), "2 needs backend torch"),
        (
            2,
            "torch",
            GroupTransport("host", 2, "ranks 0, 1 are on one GPU"),
            "GPU of its own for every rank: ranks 0, 1",
        ),
    ],
)
def test_a_group_that_cannot_hold_parts_is_refused(
    ranks: int, backend: str, transport: GroupTransport, says: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path, tmp_path, training={"backend": backend})
    with pytest.raises(WorkError, match=says) as caught:
        require_shards(parallel(job, 2), RankLayout(serial(job, 1, 1), 0, ranks), transport)
    assert caught.value.failure.field == "spec.training.parallelism.shard"


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_rows_of_all_ranks_are_all_rows(length: int) -> None:
    part = Part(0, 4)
    assert [row for rank in range(4) for row in part.rows(length, rank)] == list(range(length))
