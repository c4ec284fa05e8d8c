"""Experts divided over data parallel ranks: gradients, metrics, schedules and checkpoints equal those without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.fused_ranks import moments_of
from tests.support.training.gradient_comparison import assert_same_gradients
from tests.support.training.training_ranks import (
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    gradients_of,
    interleave,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    split_backward,
    trainer_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import FAMILIES
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.schedule.step_timing import measure
from rlhf_workers.training.trainer import Trainer

BACKENDS = ("torch", "megatron")
TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: models.write_policy(root / family, family, seed=1, num_hidden_layers=2) for family in FAMILIES}


def job_of(folder: Path, expert: int, **training: Any) -> RLHFJob:
    """Return a job with actor and critic from one folder, whose experts are divided over this many ranks."""
    parallelism = {"data": expert, "expert": expert, **training.pop("parallelism", {})}
    return make_job(folder, folder, training={"microBatchSize": 1, "parallelism": parallelism, **training})


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("family", "expert", "pipeline", "data", "training"),
    [
        ("mixtral", 2, 1, 2, {}),
        ("qwen3_moe", 4, 1, 4, {"packing": True}),
        ("qwen3_moe", 2, 2, 2, {"activationCheckpointing": True}),
        ("mixtral", 2, 2, 4, {"packing": True, "activationCheckpointing": True}),
        ("mixtral", 2, 2, 2, {"backend": "megatron"}),
        ("qwen3_moe", 4, 1, 4, {"backend": "megatron", "activationCheckpointing": True}),
    ],
)
def test_gradients_are_those_of_one_rank(
    family: str, expert: int, pipeline: int, data: int, training: dict[str, Any], folders: dict[str, Path]
) -> None:
    folder, batch = folders[family], make_batch(abstained=(3,))
    plain = make_job(folder, folder)
    expected = gradients_of(plain, serial(plain, 1, 1), 1, batch)
    job = job_of(folder, expert, **training)
    got = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_and_split_tables_have_the_bits_of_serial_ones_also_recomputed(
    backend: str, folders: dict[str, Path]
) -> None:
    folder, batch = folders["mixtral"], make_batch()
    job, recomputed = (job_of(folder, 2, backend=backend, activationCheckpointing=again) for again in (False, True))
    table = serial(job, 2, 2)
    fused = interleave(opposite(("actor", "critic"), 2, 4))
    expected = gradients_of(job, table, 4, batch)
    found = [gradients_of(job, other, 4, batch) for other in (fused, split_backward(fused))]
    for other in (*found, gradients_of(recomputed, split_backward(fused), 4, batch)):
        assert [name for name in expected if not torch.equal(other[name], expected[name])] == []


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_read_by_every_layout_bit_by_bit(
    backend: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Written by two ranks of experts, read by one rank of `torch` with all experts, and by two again, with moments."""
    folder = folders["qwen3_moe"]
    shared = job_of(folder, 2, backend=backend, parallelism={"offloadOptimizer": True})
    plain = make_job(folder, folder, training={"microBatchSize": 1})
    trained, metrics, files = run(shared, range(1), 1, 2, save=tmp_path / "0")
    _, expected, _ = run(plain, range(1), 1, 1)
    assert {name: metrics[0][name] for name in expected[0]} == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    assert len({file.path for file in files}) == len(files), "two ranks wrote one file"
    finish_folder(tmp_path / "0", folder)
    before: list[dict[str, torch.Tensor]] = []
    for number, (job, data) in enumerate([(plain, 1), (shared, 2), (plain, 1)], 1):
        last, folder_now = tmp_path / str(number - 1), tmp_path / str(number)
        read, _, _ = run(job, range(1, 1), 1, data, restore=str(last), save=folder_now)
        finish_folder(folder_now, folder)
        assert_bitwise(read, trained)
        before += [moments_of(read)] if data == 1 else []
    assert any(value.any() for value in before[0].values())
    assert before[0].keys() == before[1].keys()
    assert [name for name, value in before[0].items() if not value.equal(before[1][name])] == []


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_tensor_is_published_by_one_rank_and_measuring_changes_no_weight(
    backend: str, folders: dict[str, Path]
) -> None:
    job = job_of(folders["mixtral"], 2, backend=backend)
    table = serial(job, 1, 2)

    def work(rank: int, peers: ThreadCommunicator) -> Trainer:
        trainer = trainer_of(job, table, rank, 2, peers)
        exhaust(measure(trainer, pb.Measure(measurement_id=1)))
        return trainer

    trainers = on_ranks(2, work)
    published = [dict(TorchBackend(trainer).published("actor")) for trainer in trainers]
    assert all(published)
    assert not published[0].keys() & published[1].keys()
    whole = {name: value for tensors in published for name, value in tensors.items()}
    plain = make_job(folders["mixtral"], folders["mixtral"])
    before = on_ranks(1, lambda rank, peers: trainer_of(plain, serial(plain, 1, 1), rank, 1, peers))
    expected = dict(TorchBackend(before[0]).published("actor"))
    assert whole.keys() == expected.keys()
    assert [name for name in expected if not whole[name].equal(expected[name])] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "expert", "why"),
    [("mixtral", 3, "experts cannot be shared out over 3 ranks: use 1, 2, 4"), ("llama", 2, "has no experts: use 1")],
)
def test_models_whose_experts_do_not_divide_are_refused_by_field(
    family: str, expert: int, why: str, backend: str, tmp_path: Path
) -> None:
    job = job_of(models.write_policy(tmp_path / family, family, num_hidden_layers=1), expert, backend=backend)
    table = serial_table([Pipeline(name="actor", model="actor", stage_ranks=(0,), microbatches=1)])
    with pytest.raises(WorkError, match=why) as raised:
        on_ranks(expert, lambda rank, peers: trainer_of(job, table, rank, expert, peers))
    assert raised.value.failure.field == "spec.training.parallelism.expert"
