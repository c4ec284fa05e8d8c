"""Ranks with moments in host memory train the same bits as those with moments on the device, in every layout.

Layouts are those that ranks of one process can have. Either kind of rank reads the saved files, which do not record
where moments were.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.fused_ranks import moments_of
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    trainer_of,
)
from tests.support.training.training_roles import finish, role_of, train, trainer_in
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.job import RLHFJob
from rlhf_workers.training.optimizers import adamw
from rlhf_workers.training.trainer import Trainer

LAYOUTS = [
    ("torch", 1, 1, 1, False), ("torch", 1, 2, 2, True), ("megatron", 2, 1, 2, True), ("megatron", 1, 2, 1, False),
]  # fmt: skip
"""Backend, tensor, pipeline, data, and whether copies divide the moments."""
HELD = "train/host_optimizer_bytes"
PIECE_BYTES = 2 * 4 * 512
"""Bytes of both moments: some parameters are larger, and some chunks contain many."""

pytestmark = pytest.mark.usefixtures("megatron_group")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "OFFLOADED_PIECE_BYTES", PIECE_BYTES)


def job_of(
    policy: Path, offload: bool, backend: str = "torch", tensor: int = 1, shared: bool = False, **training: Any
) -> RLHFJob:
    parallelism = {"tensor": tensor, "shardOptimizer": shared, "offloadOptimizer": offload}
    optimizer = {"learningRate": 1e-2, "weightDecay": 0.1}
    fields = {"microBatchSize": 1, "backend": backend, "parallelism": parallelism, "optimizer": optimizer, **training}
    return make_job(policy, policy, training=fields, algorithm=TWO_EPOCHS)


def assert_same(ours: list[Trainer], theirs: list[Trainer]) -> None:
    assert_bitwise(ours, theirs)
    left, right = moments_of(ours), moments_of(theirs)
    assert left.keys() == right.keys()
    assert any(value.any() for value in right.values())
    assert [name for name in right if not torch.equal(left[name], right[name])] == []


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("backend", "tensor", "pipeline", "data", "shared"), LAYOUTS)
def test_weights_moments_and_metrics_are_those_of_moments_on_the_device(
    backend: str, tensor: int, pipeline: int, data: int, shared: bool, policy: Path
) -> None:
    ours, metrics, _ = run(job_of(policy, True, backend, tensor, shared), range(3), pipeline, data)
    theirs, expected, _ = run(job_of(policy, False, backend, tensor, shared), range(3), pipeline, data)
    assert_same(ours, theirs)
    host_bytes = [sum(optimizer.host_bytes for optimizer in trainer.optimizers.values()) for trainer in ours]
    assert [values.pop(HELD) for values in metrics] == [max(host_bytes)] * 3, "of the rank that holds most"
    assert metrics == expected
    for trainer, beside, on_host in zip(ours, theirs, host_bytes, strict=True):
        moments = [value for optimizer in beside.optimizers.values() for value in optimizer.moments()]
        on_device = sum(value.nbytes for value in moments)
        assert on_device <= on_host < 1.05 * on_device, "each begins at a cache line"
        assert on_host > 4 * PIECE_BYTES
        assert [list(optimizer.moments()) for optimizer in trainer.optimizers.values()] == [[], []]


@pytest.mark.full
def test_adapters_are_stepped_alike_and_their_trunk_stays(policy: Path) -> None:
    jobs = [job_of(policy, offload, lora={"rank": 4}, precision="BFloat16") for offload in (True, False)]
    (ours, metrics, _), (theirs, _, _) = (run(job, range(2), 1, 2) for job in jobs)
    assert_same(ours, theirs)
    trained = sum(value.numel() for optimizer in ours[0].optimizers.values() for value in optimizer.parameters.values())
    assert metrics[0][HELD] < 1.5 * 8 * trained


def test_a_drafter_that_is_trained_is_stepped_alike(policy: Path, tmp_path: Path) -> None:
    small = models.write_policy(tmp_path, "llama", seed=9, num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    model = {"path": str(small), "train": "Enabled", "learningRate": 1e-2}
    generation = {"speculation": {"drafters": ["Model"], "draftModel": model}}
    found = []
    for offload in (True, False):
        training = {"parallelism": {"offloadOptimizer": offload}}
        trainers, metrics, _ = run(make_job(policy, policy, generation=generation, training=training), range(2), 1, 2)
        draft = trainers[0].draft
        assert draft is not None
        assert draft.optimizer is not None
        assert bool(draft.optimizer.host_bytes) is offload
        found.append((trainers, {name: value.clone() for name, value in draft.optimizer.state().items()}))
        if offload:
            own = sum(optimizer.host_bytes for optimizer in trainers[0].optimizers.values())
            assert metrics[0][HELD] == own + draft.optimizer.host_bytes
    (ours, moments), (theirs, expected) = found
    assert_same(ours, theirs)
    assert [name for name, value in expected.items() if not torch.equal(moments[name], value)] == []


@pytest.mark.full
@pytest.mark.parametrize(("backend", "tensor", "pipeline", "data", "shared"), LAYOUTS[1:3])
def test_a_checkpoint_goes_from_the_host_to_the_device_and_back_bit_by_bit(
    backend: str, tensor: int, pipeline: int, data: int, shared: bool, policy: Path, tmp_path: Path
) -> None:
    host, device = job_of(policy, True, backend, tensor, shared), job_of(policy, False)
    begun, _, files = run(host, range(1), pipeline, data, save=tmp_path / "0")
    _, _, same = run(job_of(policy, False, backend, tensor, shared), range(1), pipeline, data, save=tmp_path / "same")
    assert {file.path: file.sha256 for file in files} == {file.path: file.sha256 for file in same}
    finish_folder(tmp_path / "0", policy)
    whole, _, _ = run(device, range(1, 1), 1, 1, restore=str(tmp_path / "0"), save=tmp_path / "1")
    left, right = moments_of(whole), moments_of(begun)
    assert [name for name in left if name in right and not torch.equal(left[name], right[name])] == []
    finish_folder(tmp_path / "1", policy)
    alone, _, _ = run(job_of(policy, True), range(1, 1), 1, 1, restore=str(tmp_path / "1"))
    assert_same(alone, whole)
    resumed, again, _ = run(host, range(1, 2), pipeline, data, restore=str(tmp_path / "0"))
    straight, metrics, _ = run(host, range(2), pipeline, data)
    assert_same(resumed, straight)
    assert again == metrics[1:]


@pytest.mark.full
def test_a_step_that_is_skipped_leaves_moments_as_they_were(policy: Path) -> None:
    trainers = []
    for offload in (True, False):
        job = job_of(policy, offload)
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        exhaust(trainer.train(0, make_batch(seed=0)))
        before = {name: value.clone() for name, value in moments_of([trainer]).items()}
        bad = make_batch(seed=1)
        log_p = bad.fields["log_probabilities"].clone()
        log_p[:, 0] = float("nan")
        metrics = exhaust(trainer.train(1, bad.with_fields(log_probabilities=log_p)))
        assert metrics["train/nonfinite_steps"] == 4
        assert [name for name, value in moments_of([trainer]).items() if not torch.equal(value, before[name])] == []
        exhaust(trainer.train(2, make_batch(seed=2)))
        trainers.append(trainer)
    assert_same(trainers[:1], trainers[1:])


def test_ranks_that_sleep_between_two_trainings_go_on_alike(policy: Path) -> None:
    def moments(offload: bool, sleeping: bool) -> list[dict[str, torch.Tensor]]:
        def work(rank: int, peers: ThreadCommunicator) -> dict[str, torch.Tensor]:
            role = role_of(policy, peers, rank, training={"parallelism": {"offloadOptimizer": offload}})
            for iteration in range(2):
                outbox = RecordedOutbox()
                role.handle(train(iteration), outbox)
                finish(role, outbox)
                if sleeping:
                    role.offload()
            found = {name: value.clone() for name, value in role.tensors("actor", 2)}
            return found | {name: value.clone() for name, value in moments_of([trainer_in(role)]).items()}

        return on_ranks(2, work)

    expected = moments(False, False)
    for state, expected_state in zip(moments(True, True), expected, strict=True):
        assert state.keys() == expected_state.keys()
        assert [name for name in expected_state if not torch.equal(state[name], expected_state[name])] == []
