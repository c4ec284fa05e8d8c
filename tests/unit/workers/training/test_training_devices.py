"""No tensor of training is on the wrong device, and the host reads from the device only as often as required."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import CPU, Alone, exhaust, make_batch, make_job, serial
from tests.support.workers.pretended_device import PRETENDED, CudaRules, WrongDeviceError
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_common import control_pb2 as pb
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.batches.token_budget import split_minibatch
from rlhf_workers.training.schedule.step_timing import measure
from rlhf_workers.training.stages.stage_work import StageWork
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.trainer_build import new_trainer

FAMILIES = ("llama", "qwen3", "gemma2")
GPU = torch.device("cuda:0")
EPOCHS, MICROBATCHES = 1, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: models.write_policy(root / family, family, seed=1) for family in FAMILIES}


class Unanswered(Alone):
    """Peers of a group whose other ranks do not answer."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        whole.zero_()

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        own.zero_()

    def _meet(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        return [tensor.clone()]


def trainer_on(
    device: torch.device,
    folder: Path,
    algorithm: str = "ppo",
    deterministic: bool = True,
    world: int = 1,
    **training: object,
) -> Trainer:
    """Return the last rank of a group that runs one row: a group of one, or one whose other ranks do not answer."""
    fields = {"miniBatchSize": 8, "epochs": EPOCHS, **({"klCoefficient": 0.1} if algorithm == "grpo" else {})}
    job = make_job(
        folder,
        folder if algorithm == "ppo" else None,
        algorithm={algorithm: fields},
        deterministic=deterministic,
        training=training,
        rollout={"batchSize": 8, "temperature": 0.8, "maxPromptTokens": 12, "maxResponseTokens": 24},
    )
    table = serial(job, 1, 1, ("actor", "critic") if algorithm == "ppo" else ("actor",))
    become = pb.BecomeTraining(rank=world - 1, world_size=world, schedule=table.model_dump_json())
    return build_trainer(job, become, device, lambda _: Alone() if world == 1 else Unanswered(), lambda *_, **__: None)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Replace PyTorch's own move, which cannot swap tensors that a fake mode remembers."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, device=device))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


@pytest.fixture
def autocast_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable it, because PyTorch turns it off, with a warning, where there is no GPU."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)


@pytest.fixture
def fused_adamw_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow `meta`: PyTorch has the kernel for it, but its list of devices does not contain it."""
    monkeypatch.setattr(import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *_, **__: None)


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("fused_adamw_anywhere")
@pytest.mark.parametrize(
    ("family", "algorithm", "recompute"), [("llama", "ppo", False), ("qwen3", "grpo", True), ("gemma2", "ppo", True)]
)
def test_training_mixes_no_devices_and_reads_once_a_step(
    folders: dict[str, Path], family: str, algorithm: str, recompute: bool
) -> None:
    with CudaRules() as rules:
        trainer = trainer_on(PRETENDED, folders[family], algorithm, activationCheckpointing=recompute)
        metrics = exhaust(trainer.train(0, make_batch()))
        trainer.optimizers["actor", 0].state()
    assert metrics["gradient_norm/actor"] > 0
    assert_read_once_a_step(rules, algorithm)


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("fused_adamw_anywhere")
@pytest.mark.parametrize(
    ("family", "algorithm", "deterministic", "packing"),
    [("llama", "grpo", False, False), ("gemma2", "ppo", True, True), ("qwen3", "ppo", False, True)],
)
def test_a_rank_that_has_some_positions_mixes_no_devices_and_reads_as_often(
    folders: dict[str, Path],
    family: str,
    algorithm: str,
    deterministic: bool,
    packing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def written_out(queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool, device=PRETENDED).tril(keys - queries)[None, None]

    # PyTorch cannot make its own, which has no numbers, while operations are watched.
    monkeypatch.setattr("rlhf_workers.training.parallel.context_attention.causal_lower_right", written_out)
    training = {"parallelism": {"context": 2}, "packing": packing}
    with CudaRules() as rules:
        trainer = trainer_on(PRETENDED, folders[family], algorithm, deterministic, 2, **training)
        exhaust(trainer.train(0, make_batch()))
    assert_read_once_a_step(rules, algorithm)


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("fused_adamw_anywhere")
@pytest.mark.parametrize(
    ("family", "deterministic", "mode"),
    [("llama", False, "Enabled"), ("gemma2", True, "Enabled"), ("qwen3", False, "Auto")],
)
def test_rows_that_share_prompts_mix_no_devices_and_read_as_often(
    folders: dict[str, Path], family: str, deterministic: bool, mode: str
) -> None:
    batch = make_batch()
    batch = replace(batch, prompts=tuple(torch.arange(3, 23) + sample // 4 for sample in range(8)))
    with CudaRules() as rules:
        trainer = trainer_on(PRETENDED, folders[family], "ppo", deterministic, packing=True, sharedPrompts=mode)
        rules.read_back.clear()  # the sizes of the models, once per process
        metrics = exhaust(trainer.train(0, batch))
    assert metrics["train/shared_prompt_ratio"] < 1
    assert_read_once_a_step(rules, "ppo")


def assert_read_once_a_step(rules: CudaRules, algorithm: str) -> None:
    # One of the sums that a step's clipping is decided by, and at the end sums and maxima of each model's metrics.
    models_trained = 2 if algorithm == "ppo" else 1
    assert sum(rules.read_back.values()) <= EPOCHS + 2 * models_trained, rules.read_back


@pytest.mark.full
def test_measuring_mixes_no_devices(folders: dict[str, Path]) -> None:
    with CudaRules():
        trainer = trainer_on(PRETENDED, folders["llama"])
        result = exhaust(measure(trainer, pb.Measure(measurement_id=1)))
    assert {(stage.model, stage.stage) for stage in result.stages} == {("actor", 0), ("critic", 0)}


def test_the_rules_find_a_tensor_that_was_left_behind() -> None:
    on_device, on_host = torch.ones(3, 3, device=PRETENDED), torch.ones(3, 3)
    with CudaRules() as rules:
        with pytest.raises(WrongDeviceError, match="aten::mm of tensors on two devices"):
            torch.mm(on_device, on_host)
        with pytest.raises(WrongDeviceError, match="two devices"):
            torch.index_select(on_device, 0, on_host[0].int())
        on_device.add_(on_host.to(PRETENDED)).mul_(torch.tensor(2.0))
        assert float(on_device.sum()) == 1.0
    assert rules.read_back == Counter({"aten::_local_scalar_dense": 1})


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("autocast_of_a_gpu")
@pytest.mark.parametrize(("family", "precision"), [("llama", "BFloat16"), ("gemma2", "BFloat16"), ("qwen3", "Float32")])
def test_forward_losses_and_optimizer_run_on_fake_gpus_in_either_precision(
    folders: dict[str, Path], family: str, precision: str
) -> None:
    """Covers branches that `meta` cannot: CUDA code and its autocast. PyTorch's backward needs a real GPU."""
    real = trainer_on(CPU, folders[family], deterministic=False, precision=precision)
    batch = real.algorithm.prepare(make_batch())
    plan = split_minibatch(real.layout, list(range(8)), batch.lengths, together=1, most_tokens=None)
    works = real.mini_batch(batch, plan, real.objectives())
    with FakeTensorMode(allow_non_fake_inputs=True):
        for stage in real.stages.values():
            move(stage, GPU)
        trainer = new_trainer(
            real.spec, real.layout, real.stages, real.communicator, GPU, real.compute, lambda *_, **__: None
        )
        objectives = trainer.objectives()
        for pipeline_work, objective in zip(works.values(), objectives.values(), strict=True):
            microbatches = [microbatch.to(GPU) for microbatch in pipeline_work._microbatches]
            work = StageWork(1, pipeline_work.local_stages, microbatches, objective.loss, trainer.compute)
            for microbatch in range(MICROBATCHES):
                loss = work.forward(0, microbatch, work.embed(microbatch))
                assert (loss.device, loss.dtype) == (GPU, torch.float32)
            masks = [
                mask for _, of_kind in pipeline_work.local_stages[0]._geometries.values() for mask in of_kind.values()
            ]
            written_out = pipeline_work.local_stages[0].config._attn_implementation == "eager"
            assert all((mask is not None) == (written_out or precision == "Float32") for mask in masks)
        for optimizer in trainer.optimizers.values():
            assert optimizer.norm_squared().device.type == "cuda"
            optimizer.step(1e-3, 0.5)
            assert {value.device.type for value in optimizer.moments()} == {"cuda"}
        assert {objective.statistics["loss"].device.type for objective in objectives.values()} == {"cuda"}
