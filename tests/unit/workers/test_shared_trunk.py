"""One copy of frozen weights for several models: the same results, half the memory, and one move for all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import CPU, assert_bitwise, make_job, run
from tests.support.training.training_roles import stage_copies
from tests.support.workers.stand_in_memory import StandInMemory

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_VALUES
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_coordinator.model_sizes import read_size
from rlhf_planner.device_memory import training
from rlhf_workers.inference.inference_role import InferenceRole
from rlhf_workers.inference.scorers import load_scorer
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.stages.stage_copy import StageCopy
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.weights.adapters import AdapterWeights
from rlhf_workers.weights.fetching import FetchedWeights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "gemma2", "gemma2", seed=1)


def job_of(folder: Path, trunk: str, precision: str = "Float32") -> RLHFJob:
    lora = {"rank": 3, "alpha": 6.0, "publish": "Adapters", "trunk": trunk}
    return make_job(folder, folder, training={"lora": lora, "precision": precision})


def frozen_bytes(trainer: Trainer) -> int:
    """Return the bytes of frozen tensors, each counted once."""
    parts = {id(p): p.nbytes for s in trainer.stages.values() for p in s.parameters() if not p.requires_grad}
    return sum(parts.values())


def test_a_trunk_goes_to_the_host_once_and_what_is_trained_each_time(folder: Path) -> None:
    (trainer,), _, _ = run(job_of(folder, "Shared"), range(1), 1, 1)
    stage, optimizer, memory = trainer.stages["actor", 0], trainer.optimizers["actor", 0], StandInMemory()
    copy = StageCopy(stage, optimizer, CPU, memory=memory)
    tensors = [*stage.parameters(), *stage.buffers(), *optimizer.moments()]
    before, moved = [tensor.detach().clone() for tensor in tensors], []
    for _ in range(3):
        optimizer.drop_gradients()
        copied = memory.stream.copied
        copy.offload()
        moved.append(memory.stream.copied - copied)
        copy.onload()
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    frozen = sum(not parameter.requires_grad for parameter in stage.parameters())
    assert frozen > 0
    assert moved == [len(tensors), len(tensors) - frozen, len(tensors) - frozen]


def test_a_rank_holds_the_trunk_of_actor_and_critic_once_and_trains_the_same_bits(folder: Path) -> None:
    separate, metrics, _ = run(job_of(folder, "Separate"), range(2), pipeline=2)
    shared, same, _ = run(job_of(folder, "Shared"), range(2), pipeline=2)
    assert metrics == same
    assert_bitwise(shared, separate)
    for ours, theirs in zip(shared, separate, strict=True):
        assert frozen_bytes(ours) < 0.6 * frozen_bytes(theirs)
        moved = [part for copy in stage_copies(ours) for part in copy._tensors()]
        assert len({id(part) for part in moved}) == len(moved), "each tensor moves once"


@pytest.mark.parametrize("precision", ["Float32", "BFloat16"])
@pytest.mark.parametrize("trunk", ["Separate", "Shared"])
def test_the_estimate_of_a_rank_is_what_it_holds(trunk: str, precision: str, folder: Path) -> None:
    job, size = job_of(folder, trunk, precision), read_size(folder)
    (trainer,), _, _ = run(job, range(1), pipeline=1)
    optimizers = trainer.optimizers.values()
    trained = sum(part.nbytes for optimizer in optimizers for part in optimizer.parameters.values())
    measured = {
        "weights": trained,
        "gradients": sum(optimizer.gradients.nbytes for optimizer in optimizers),
        "optimizer": sum(part.nbytes for optimizer in optimizers for part in optimizer.moments()),
        "frozen weights": frozen_bytes(trainer),
    }
    estimate = training(job.spec, {ModelRole.ACTOR: size, ModelRole.CRITIC: size})
    assert not estimate.unknown
    assert {name: estimate.parts[name] for name in measured} == pytest.approx(measured, rel=0.05)


def sample() -> ScoringSample:
    prompt, response = np.arange(3, 9, dtype=np.int32), np.arange(9, 29, dtype=np.int32)
    return ScoringSample(SampleKey(0, 0, 0), prompt, response, "", "", "{}")


@pytest.mark.parametrize("precision", ["Float32", "BFloat16"])
def test_a_critic_over_the_references_weights_says_what_its_whole_model_says(precision: str, folder: Path) -> None:
    job = job_of(folder, "Shared", precision)
    (trained,), _, _ = run(job, range(2), pipeline=1)
    adapters = dict(TorchBackend(trained).published("critic"))
    trunks: dict[str, Any] = {}
    reference: Any = load_scorer(SCORE_REFERENCE, job.spec, CPU, trunks=trunks)
    before = reference.score([sample()])[0]
    shared: Any = load_scorer(SCORE_VALUES, job.spec, CPU, trunks=trunks)
    whole: Any = load_scorer(SCORE_VALUES, job_of(folder, "Separate", precision).spec, CPU)
    assert np.allclose(shared.score([sample()])[0], whole.score([sample()])[0], atol=1e-6), "B begins at zero"
    for trunk, scorer in (("Shared", shared), ("Separate", whole)):
        take(job_of(folder, trunk, precision), scorer, adapters)
    tolerance = 1e-4 if precision == "Float32" else 0.05
    wanted = whole.score([sample()])[0]
    assert np.allclose(shared.score([sample()])[0], wanted, atol=tolerance * (1 + np.abs(wanted).max()))
    assert float(np.abs(wanted).max()) > 0
    assert np.array_equal(reference.score([sample()])[0], before), "the reference is the trunk without adapters"
    own = {id(part) for part in shared.model.parameters()} - {id(part) for part in reference.model.parameters()}
    small = sum(part.nbytes for part in shared.model.parameters() if id(part) in own)
    assert small < 0.3 * sum(part.nbytes for part in whole.model.parameters())


def take(job: RLHFJob, scorer: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Load a critic from the ranks, like an inference worker."""

    @contextmanager
    def came(
        model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        yield FetchedWeights(dict(tensors), {"stream": 1})

    role = InferenceRole(0, None, 40, CPU, AdapterWeights(job.spec, came))
    role.add("values", "critic", scorer)
    sources = [pb.WeightLocation(address="rank-0:7710")]
    assert role.load(pb.LoadWeights(model="critic", version=2, sources=sources), None).version == 2
