"""One precision: generation, scoring and training load their models in the manifest's type, on any device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import CPU, Alone, make_job, serial, trainer_of

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_VALUES
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_planner.device_memory import ModelSize, decoding, scoring
from rlhf_workers.failures import WorkError
from rlhf_workers.generation import generation_role as generation
from rlhf_workers.inference.scorers import load_scorer
from rlhf_workers.models.precision import compute_dtype

SHORT = {"batchSize": 8, "maxPromptTokens": 16, "maxResponseTokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "llama", "llama", seed=1)


def loaded(job: RLHFJob) -> dict[str, torch.dtype]:
    """Return role -> type in which its model is computed, as each role loads it."""
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    decoding = generation.build(job, pb.Command(), CPU, None)
    scorers = {task.model: load_scorer(task, job.spec, CPU) for task in (SCORE_REFERENCE, SCORE_VALUES)}
    return {
        "training": trainer.compute,
        "published": next(iter(trainer_tensors(trainer))).dtype,
        "generation": decoding._engine._forward.model.dtype,  # type: ignore[attr-defined]
        **{role: next(scorer.model.parameters()).dtype for role, scorer in scorers.items()},  # type: ignore[union-attr]
    }


def trainer_tensors(trainer: Any) -> Any:
    from rlhf_workers.training.backends.torch_backend import TorchBackend
    from rlhf_workers.training.training_role import SpanBuffer, TrainingRole

    role = TrainingRole(make_job(Path("unused")), TorchBackend(trainer), None, 0, SpanBuffer())  # type: ignore[arg-type]
    return (tensor for _, tensor in role.tensors("actor", 0))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("Auto", torch.float32), ("Float32", torch.float32), ("BFloat16", torch.bfloat16)]
)
def test_every_role_loads_the_type_of_the_job(precision: str, dtype: torch.dtype, folder: Path) -> None:
    job = make_job(folder, folder, deterministic=False, rollout=SHORT, training={"precision": precision})
    result = loaded(job)
    assert result == dict.fromkeys(result, dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ({"training": {"gpusPerReplica": 1}}, torch.bfloat16),
        (
            {"training": {"gpusPerReplica": 1, "precision": "Float32"}, "generation": {"gpusPerReplica": 1}},
            torch.float32,
        ),
        ({"generation": {"gpusPerReplica": 1}}, torch.float32),
        ({"generation": {"gpusPerReplica": 1}, "placement": "Colocated"}, torch.bfloat16),
        ({"inference": {"gpusPerReplica": 1}}, torch.float32),
    ],
)
def test_auto_is_what_the_ranks_use_wherever_the_other_roles_run(spec: dict[str, Any], dtype: torch.dtype) -> None:
    assert compute_dtype(make_job(Path("policy"), **spec).spec) == dtype


def test_an_engine_argument_of_another_type_is_refused(folder: Path) -> None:
    job = make_job(
        folder, rollout=SHORT, generation={"engineArgs": {"dtype": "bfloat16"}}, training={"precision": "Float32"}
    )
    with pytest.raises(WorkError, match=r"'bfloat16' must be one of float32, because spec.training.precision Float32"):
        generation.build(job, pb.Command(), CPU, None)
    same = make_job(folder, rollout=SHORT, generation={"engineArgs": {"dtype": "float32"}})
    generation.build(same, pb.Command(), CPU, None).close()


def test_a_coarser_engine_needs_that_no_ratio_is_against_it(folder: Path) -> None:
    """Tokens that are carried into a later iteration are compared with it, unless a correction weighs them."""
    settings: dict[str, Any] = {
        "deterministic": False,
        "generation": {"engineArgs": {"dtype": "bfloat16"}},
        "training": {"precision": "Float32"},
    }
    own: dict[str, Any] = {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}
    corrected = {"ppo": own["ppo"] | {"mismatchCorrection": {"mode": "Truncate"}}}
    carried = SHORT | {"oversample": 1, "maxStaleness": 1}
    for algorithm, rollout in ((own, SHORT), (corrected, carried)):
        generation.build(
            make_job(folder, folder, algorithm=algorithm, rollout=rollout, **settings), pb.Command(), CPU, None
        ).close()
    with pytest.raises(
        WorkError, match=r"must be one of float32.*mismatchCorrection covers the tokens of older weights"
    ):
        generation.build(make_job(folder, folder, algorithm=own, rollout=carried, **settings), pb.Command(), CPU, None)


def test_memory_is_estimated_in_the_type_that_is_used() -> None:
    sizes: dict[str, ModelSize | None] = {
        ModelRole.ACTOR: ModelSize(1000, 10),
        ModelRole.REFERENCE: ModelSize(1000, 10),
    }
    for precision, width in (("Float32", 4), ("BFloat16", 2)):
        training = {"gpusPerReplica": 1, "precision": precision}
        spec = make_job(Path("policy"), training=training, generation={"gpusPerReplica": 1}).spec
        assert decoding(spec, sizes).parts["weights"] == 1000 * width
        assert scoring(spec, sizes).parts["reference weights"] == 1000 * width
