"""For any storage layout of a model, engine, ranks, scorers and version 0 read the same numbers, or all reject it
alike."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from tests.support.model_folders.folder_layouts import FolderLayout, layouts
from tests.support.training.training_ranks import make_job

from rlhf_api.algorithms import ModelRole
from rlhf_coordinator.model_folder_problems import model_folder_problems
from rlhf_coordinator.model_sizes import read_size
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import checked_folder, load_backbone_with_value_head, load_causal_lm
from rlhf_workers.training.backends.torch_backend import weights_folder
from rlhf_workers.training.stages.model_stages import build_stage, read_config
from rlhf_workers.weights.expert_files import as_in_files
from rlhf_workers.weights.folder import read_folder
from rlhf_workers.weights.tensor_file import model_tensors

FIELD = "spec.models.actor.path"
CPU = torch.device("cpu")
HOW: dict[str, Any] = {"field": FIELD, "dtype": torch.float32, "device": CPU, "attention": "eager"}
Named = dict[str, torch.Tensor]


def in_files(named: Named, family: str) -> Named:
    """Return tensors with the names in files, float32."""
    return {
        part: own.detach().float() for name, value in named.items() for part, own in as_in_files(name, value, family)
    }


def of_engine(folder: Path, family: str) -> Named:
    model = load_causal_lm(str(folder), **HOW)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == bool(model.config.tie_word_embeddings)
    return in_files(dict(model.named_parameters()), family)


def of_rank(folder: Path, family: str) -> Named:
    job = make_job(folder)
    place, field = weights_folder(job, ModelRole.ACTOR, "")
    stage = build_stage(read_config(place, field, 1), model_tensors(place, field), 1, 0, "lm", CPU, "eager")
    return in_files(dict(stage.named_parameters()), family)


def of_scorer(folder: Path, family: str) -> Named:
    model = load_backbone_with_value_head(str(folder), **HOW)
    return in_files({name: value for name, value in model.named_parameters() if name != "value_head.weight"}, family)


def of_version_0(folder: Path, family: str) -> Named:
    return in_files(read_folder("actor", folder), family)


def refusal(read: Callable[[], object]) -> tuple[str, str] | None:
    """Return a reader's error for a folder that it rejects."""
    try:
        read()
    except WorkError as error:
        return error.failure.reason, error.failure.message
    return None


@settings(max_examples=120, deadline=None)
@given(layouts())
def test_all_readers_read_one_model_or_refuse_it_in_one_way(layout: FolderLayout) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = layout.write(Path(place) / "model")
        refused = refusal(lambda: checked_folder(str(folder), FIELD))
        problems = list(model_folder_problems(make_job(folder).spec))
        if refused is None:
            assert problems == []
            read_alike(folder, layout)
            return
        [(field, path, problem)] = problems
        assert (problem.reason, f"{field}: {path}: {problem}") == refused
        for read in (of_engine, of_rank):
            assert refusal(lambda read=read: read(folder, layout.family)) == refused  # type: ignore[misc]


def read_alike(folder: Path, layout: FolderLayout) -> None:
    """Compare the tensors of each reader for an accepted folder."""
    engine, rank = of_engine(folder, layout.family), of_rank(folder, layout.family)
    scorer, version_0 = of_scorer(folder, layout.family), of_version_0(folder, layout.family)
    assert engine.keys() == rank.keys()
    assert scorer.keys() == engine.keys() - {"lm_head.weight"}
    for name, value in engine.items():
        assert torch.equal(rank[name], value)
        assert torch.equal(version_0[name], value)
        assert name == "lm_head.weight" or torch.equal(scorer[name], value)
    head = version_0.get("lm_head.weight", version_0["model.embed_tokens.weight"])
    assert torch.equal(engine.get("lm_head.weight", engine["model.embed_tokens.weight"]), head)
    size = read_size(folder)
    assert size is not None
    assert size.parameters == sum(value.numel() for value in version_0.values())
