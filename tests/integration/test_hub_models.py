"""Models by hub id in real local runs: a job trains as with the folder; a bad folder is refused with its name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tests.support.jobs.chaos import assert_same_weights, run_job
from tests.support.jobs.local_job import write_job
from tests.support.model_folders.model_hub import ModelHub, model_hub

from rlhf_common.names import ExitCode

pytestmark = pytest.mark.timeout(1800)

HUB_ID = "team/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """Yield a hub that all processes of a run use, with an empty cache."""
    with model_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield served


def write_by_folder(folder: Path, engine: str) -> Path:
    """Write the job; its actor and critic are the folder `policy` beside the manifest."""
    return write_job(folder, algorithm="grpo", iterations=2, batch=8, responses=8, every=1, engine=engine)


def write_by_hub_id(manifest: Path) -> Path:
    """Write the same job with the actor by hub id, beside the manifest with the folder."""
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["models"]["actor"]["path"] = HUB_ID
    other = manifest.with_name("by-hub-id.yaml")
    other.write_text(yaml.safe_dump(job))
    return other


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.full)])
def test_a_hub_id_trains_as_its_folder_does(tmp_path: Path, hub: ModelHub, engine: str) -> None:
    manifest = write_by_folder(tmp_path, engine)
    hub.models[HUB_ID] = tmp_path / "policy"
    by_hub_id = run_job(write_by_hub_id(manifest), tmp_path / "by-hub-id")
    exported = tmp_path / "by-hub-id" / "checkpoints"
    assert {path.name for path in exported.rglob("tokenizer.json")} == {"tokenizer.json"}, "a checkpoint loads alone"
    if engine == "torch":  # vLLM's jobs are not deterministic
        assert_same_weights(by_hub_id, run_job(manifest, tmp_path / "by-folder"))


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.full)])
def test_a_folder_on_the_hub_without_a_tensor_is_refused_by_its_name(
    tmp_path: Path, hub: ModelHub, engine: str
) -> None:
    manifest = write_by_folder(tmp_path, engine)
    hub.models[HUB_ID] = tmp_path / "policy"
    [weights] = (tmp_path / "policy").glob("*.safetensors")
    tensors = load_file(weights)
    lacking = next(name for name in sorted(tensors) if name.endswith("mlp.up_proj.weight"))
    del tensors[lacking]
    save_file(tensors, weights, metadata={"format": "pt"})
    refused = run_job(write_by_hub_id(manifest), tmp_path / "run", code=ExitCode.BAD_MODEL)
    assert lacking in refused.output, str(refused)
    # A rank reads the folder as the actor's, a scorer as the reference's: the first one to read it ends the job.
    assert re.search(r"spec\.models\.(actor|reference)\.path", refused.output), str(refused)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_an_id_that_the_hub_does_not_have_is_refused_with_the_remedy(tmp_path: Path, hub: ModelHub) -> None:
    manifest = write_by_folder(tmp_path, "torch")
    hub.models["team/other"] = tmp_path / "policy"
    refused = run_job(write_by_hub_id(manifest), tmp_path / "run", code=ExitCode.BAD_MODEL)
    assert HUB_ID in refused.output
    assert "let pods of the job reach the hub" in refused.output
