"""Models of experts: gradients of every layout equal the whole model's, and folders are reproduced.

The oracle is transformers' own model on one unpadded sample at a time (`plain_gradients`). Tolerance: 1e-5 relative to
the largest gradient entry of the parameter.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.training.fused_ranks import moments_of
from tests.support.training.gradient_comparison import assert_same_gradients, plain_gradients
from tests.support.training.training_ranks import (
    assert_bitwise,
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
from rlhf_coordinator.model_sizes import read_size
from rlhf_planner.schedule.methods import opposite
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import FAMILIES
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.weights.expert_files import NAMES

TOLERANCE = 1e-5


def test_files_are_converted_for_the_families_whose_experts_are_computed() -> None:
    assert NAMES.keys() == set(FAMILIES)


@pytest.mark.full
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_has_the_gradients_of_the_whole_model(
    family: str, packing: bool, folders: dict[str, Path]
) -> None:
    job = make_job(folders[family], folders[family], training={"packing": packing})
    batch = make_batch()
    plain = plain_gradients(job, batch)
    routers = [name for name in plain if name.startswith("actor:") and name.endswith("mlp.gate.weight")]
    assert len(routers) == {"mixtral": 4, "qwen3_moe": 3}[family]
    assert all(plain[name].any() for name in routers), "a policy's loss reaches the routers"
    for pipeline, data in ((1, 1), (2, 1), (1, 2), (2, 2)):
        ours = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
        assert_same_gradients(ours, plain, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_tables_and_recomputation_have_the_bits_of_serial_ones(family: str, folders: dict[str, Path]) -> None:
    job, batch = make_job(folders[family], folders[family]), make_batch()
    recomputed = make_job(folders[family], folders[family], training={"activationCheckpointing": True})
    table = serial(job, 2, 1)
    fused = interleave(opposite(("actor", "critic"), 2, 4))
    expected = gradients_of(job, table, 2, batch)
    found = [gradients_of(job, other, 2, batch) for other in (fused, split_backward(fused), split_backward(table))]
    for other in (*found, gradients_of(recomputed, table, 2, batch)):
        assert [name for name in expected if not torch.equal(other[name], expected[name])] == []


@pytest.mark.full
def test_bfloat16_computes_near_the_same_gradients_on_float32_weights(folders: dict[str, Path]) -> None:
    plain, low = (
        make_job(folders["mixtral"], folders["mixtral"], training={"precision": precision})
        for precision in ("Float32", "BFloat16")
    )
    exact, rounded = (gradients_of(job, serial(job, 2, 1), 2, make_batch()) for job in (plain, low))
    assert {value.dtype for value in rounded.values()} == {torch.float32}
    apart = sum(float((rounded[name] - value).square().sum()) for name, value in exact.items())
    assert 0 < apart < 0.05 * sum(float(value.square().sum()) for value in exact.values())


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_the_names_and_bytes_of_the_folder_it_came_from(
    family: str, stages: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(folders[family])
    saved = saved_alone(job, stages, tmp_path)
    source = load_file(folders[family] / "model.safetensors")
    assert saved.keys() == source.keys()
    for name, value in source.items():
        assert saved[name].shape == value.shape
        assert saved[name].numpy().tobytes() == value.numpy().tobytes(), name


def saved_alone(job: RLHFJob, stages: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return the files of a single policy that was loaded and saved without training."""
    on_ranks(
        stages,
        lambda rank, peers: checkpoint.save(
            trainer_of(job, serial(job, stages, 1, ("actor",)), rank, stages, peers), folder, 0
        ),
    )
    return {name: value for part in (folder / "actor").glob("*.safetensors") for name, value in load_file(part).items()}


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_from_a_checkpoint_in_another_layout(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(folders[family], folders[family])
    straight, _, _ = run(job, range(1), pipeline=2, save=tmp_path)
    finish_folder(tmp_path, folders[family])
    for pipeline in (1, 2):
        restored, _, _ = run(job, range(1, 1), pipeline=pipeline, restore=str(tmp_path))
        assert_bitwise(restored, straight)
        theirs, ours = moments_of(straight), moments_of(restored)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_an_expert_that_the_folder_lacks_is_named_as_the_folder_names_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["mixtral"] / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["mixtral"] / "config.json").read_bytes())
    job = make_job(tmp_path)
    with pytest.raises(WorkError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight is missing") as raised:
        on_ranks(1, lambda rank, peers: trainer_of(job, serial(job, 1, 1, ("actor",)), rank, 1, peers))
    assert raised.value.failure.reason == "ModelCorrupt"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_refused_by_field_and_family(family: str, folders: dict[str, Path]) -> None:
    job = make_job(folders[family], training={"lora": {"rank": 4}})
    with pytest.raises(WorkError, match=f"'{family}', a mixture of experts, .*: leave the field out") as raised:
        on_ranks(1, lambda rank, peers: trainer_of(job, serial(job, 1, 1, ("actor",)), rank, 1, peers))
    assert raised.value.failure.field == "spec.training.lora"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_with_counts_every_expert(family: str, folders: dict[str, Path]) -> None:
    job, size = make_job(folders[family]), read_size(folders[family])
    assert size is not None
    trainer = on_ranks(1, lambda rank, peers: trainer_of(job, serial(job, 1, 1, ("actor",)), rank, 1, peers))[0]
    assert size.parameters == sum(value.numel() for value in trainer.optimizers["actor", 0].parameters.values())
    assert {"q_proj", "o_proj"} <= size.map_widths.keys()
    assert "up_proj" not in size.map_widths, "experts have no adapters"
