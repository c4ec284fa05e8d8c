"""Weights sent as adapters are bitwise complete at the receiver; incomplete ones are rejected."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.support.model_folders import models
from tests.support.training.training_ranks import Alone, make_job, run, serial, trainer_of

from rlhf_api.job import RLHFJob
from rlhf_api.job.lora import EVERY_TARGET
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ADAPTER_FIELD
from rlhf_coordinator.model_folder_problems import check_model_folders
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.generation_role import build
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.weights.adapters import AdapterWeights
from rlhf_workers.weights.fetching import FetchedWeights
from rlhf_workers.weights.folder import read_file, read_folder

LORA = {"rank": 3, "alpha": 6.0, "targetModules": ["q_proj", "v_proj", "down_proj"]}
RANKS = [pb.WeightLocation(address="rank-0:7710")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=1)


def job_of(folder: Path, **lora: Any) -> RLHFJob:
    precision = lora.pop("precision", "Auto")
    rollout = {"batchSize": 8, "maxPromptTokens": 8, "maxResponseTokens": 16}
    return make_job(folder, folder, rollout=rollout, training={"lora": {**LORA, **lora}, "precision": precision})


def opener(job: RLHFJob, tensors: Mapping[str, torch.Tensor]) -> AdapterWeights:
    """Return a weight source with these tensors, as if they had come from the ranks."""

    @contextmanager
    def came(
        model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        size = sum(value.nbytes for value in tensors.values())
        yield FetchedWeights(dict(tensors), {"stream": size})

    return AdapterWeights(job.spec, came)


def published(trainer: Trainer, model: str) -> dict[str, torch.Tensor]:
    return dict(TorchBackend(trainer).published(model))


@pytest.mark.parametrize("precision", ["Float32", "BFloat16"])
def test_adapters_that_travel_are_to_the_bit_what_ranks_would_have_merged(precision: str, folder: Path) -> None:
    whole, alone = (job_of(folder, precision=precision, publish=kind) for kind in ("Merged", "Adapters"))
    (there,), _, _ = run(whole, range(1), pipeline=1)
    ranks, _, _ = run(alone, range(1), pipeline=2)
    for model in ("actor", "critic"):
        single = trainer_of(alone, serial(alone, 1, 1), 0, 1, Alone())
        for key, stage in there.stages.items():
            single.stages[key].load_state_dict(stage.state_dict())
        sent, wanted = published(single, model), published(there, model)
        with opener(alone, sent)(model, 1, RANKS, None) as opened:
            assert opened.tensors.keys() == wanted.keys()
            loaded = {name: value.to(wanted[name].dtype) for name, value in opened.tensors.items()}
            assert [name for name, value in wanted.items() if not torch.equal(loaded[name], value)] == []
            assert sum(opened.bytes_by_way.values()) < sum(value.nbytes for value in wanted.values()) / 3
        together = {name: value for rank in ranks for name, value in published(rank, model).items()}
        assert together.keys() == sent.keys(), "stages together publish what one does"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda sent: sent.pop("model.layers.1.mlp.down_proj.lora_A.weight"), "lora_A.weight is missing"),
        (lambda sent: [sent.pop(name) for name in list(sent) if "layers.0.mlp" in name], "has none"),
        (lambda sent: sent.update({"model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(7, 3)}), "shape"),
    ],
)
def test_adapters_that_are_not_whole_are_refused(harm: Any, says: str, folder: Path) -> None:
    job = job_of(folder, publish="Adapters")
    sent = published(trainer_of(job, serial(job, 1, 1), 0, 1, Alone()), "actor")
    harm(sent)
    with pytest.raises(WorkError, match=says), opener(job, sent)("actor", 1, RANKS, None):
        pass


def peft_model(folder: Path, target: Path, **changes: Any) -> Any:
    """Return the folder's model with random PEFT adapters, which PEFT saves to `target`."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": LORA["targetModules"], "task_type": "CAUSAL_LM", **changes}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(target)
    return adapted.eval()


def test_a_job_starts_from_pefts_own_folder_on_ranks_and_engines_alike(folder: Path, tmp_path: Path) -> None:
    theirs = peft_model(folder, tmp_path / "adapter")
    job = job_of(folder, adapter=str(tmp_path / "adapter"))
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    ours = published(trainer, "actor")
    sources = [pb.WeightLocation(folder=str(folder))]
    with opener(job, read_folder("actor", folder))("actor", 0, sources, None) as opened:
        assert [name for name, value in ours.items() if not torch.equal(opened.tensors[name], value)] == []
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        stage = trainer.stages["actor", 0]
        assert torch.allclose(stage.logits(stage(stage.embed(tokens))), theirs(tokens).logits, atol=1e-4)
    become = pb.BecomeGeneration(weights=pb.LoadWeights(model="actor", sources=sources))
    role = build(job, pb.Command(become_generation=become), torch.device("cpu"), None)
    engine: Any = role._engine
    parameters = dict(engine._model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in ours.items())
    critic = published(trainer, "critic")
    source = read_folder("critic", folder)
    assert all(torch.equal(critic[name], source[name]) for name in critic if name in source), "adapters are the actor's"


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": "orthogonal", "r": 2},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": False},
        {"lora_dropout": 0.2},
        {"target_modules": "all-linear"},
    ],
)
def test_an_accepted_folder_says_what_peft_says_when_it_loads_it(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Version 0 of ranks and engines against PEFT's model of the folder: merged weights and logits."""
    trained = peft_model(folder, tmp_path / "adapter", **changes)
    file = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"target_modules": changes.get("target_modules", saved["target_modules"])}))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokens = torch.arange(3, 20)[None]
    lora = {"rank": saved["r"]} | ({"targetModules": list(EVERY_TARGET)} if "target_modules" in changes else {})
    job = job_of(folder, adapter=str(tmp_path / "adapter"), **lora)
    check_model_folders(job.spec)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    sources = [pb.WeightLocation(folder=str(folder))]
    with opener(job, read_folder("actor", folder))("actor", 0, sources, None) as opened, torch.no_grad():
        stage = trainer.stages["actor", 0]
        logits = theirs(tokens).logits
        assert torch.allclose(stage.logits(stage(stage.embed(tokens))), logits, atol=1e-4)
        assert torch.allclose(trained(tokens).logits, logits, atol=1e-4), "PEFT changes nothing as it loads"
        merged = theirs.merge_and_unload().state_dict()
        assert all(torch.allclose(merged[name], value, atol=1e-5) for name, value in opened.tensors.items())


def test_pissa_is_refused_because_peft_changes_the_base_as_it_loads(folder: Path, tmp_path: Path) -> None:
    peft_model(folder, tmp_path / "adapter", init_lora_weights="pissa")
    job = job_of(folder, adapter=str(tmp_path / "adapter"))
    says = "spec.training.lora.adapter: .* has init_lora_weights: 'pissa'"
    with pytest.raises(WorkError, match=says):
        trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    sources = [pb.WeightLocation(folder=str(folder))]
    tensors = read_folder("actor", folder)
    with pytest.raises(WorkError, match=says), opener(job, tensors)("actor", 0, sources, None):
        pass


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"r": 4}, "spec.training.lora.rank: is 3, and .* was saved with 4: use 4"),
        ({"use_rslora": True}, "spec.training.lora.adapter: .* has use_rslora: True"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, "spec.training.lora.targetModules"),
    ],
)
def test_adapters_that_the_manifest_does_not_describe_are_refused(
    changes: dict[str, Any], says: str, folder: Path, tmp_path: Path
) -> None:
    peft_model(folder, tmp_path / "adapter", **changes)
    job = job_of(folder, adapter=str(tmp_path / "adapter"))
    with pytest.raises(WorkError, match=says):
        trainer_of(job, serial(job, 1, 1), 0, 1, Alone())


def test_a_damaged_file_is_refused_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(WorkError, match=r"adapter_model.safetensors") as refused:
        read_file(ADAPTER_FIELD, tmp_path, tmp_path / "adapter_model.safetensors")
    assert (refused.value.failure.reason, refused.value.failure.field) == ("ModelCorrupt", ADAPTER_FIELD)
