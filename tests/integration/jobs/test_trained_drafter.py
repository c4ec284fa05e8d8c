"""A real job that trains a draft model: policy and critic have the same bits as without it.

After a kill a rank reaches the same draft model as undisturbed, and its checkpoint has it as a Hugging Face folder.
"""

import hashlib
import json
from pathlib import Path

import pytest
import transformers
from tests.support.jobs.chaos import Kills, run_job
from tests.support.jobs.local_job import edited_spec, write_job
from tests.support.model_folders import models

pytestmark = pytest.mark.full

ITERATIONS = 3
DRAFT_MODEL = "generation.speculation.draftModel"


def job_with_a_draft_model(folder: Path) -> Path:
    manifest = write_job(folder, iterations=ITERATIONS)
    models.write_policy(folder / "draft", "llama", seed=9, num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    with edited_spec(manifest) as spec:
        model = {"path": "draft", "train": "Enabled", "learningRate": 0.01}
        speculation = {"mode": "Fixed", "maxTokens": 2, "drafters": ["Model"], "draftModel": model}
        spec["generation"]["speculation"] = speculation
    return manifest


def digests(run_dir: Path) -> dict[str, str]:
    """Return model -> digest of its weights and moments in the last checkpoint."""
    folder = run_dir / "checkpoints" / f"iteration-{ITERATIONS:06d}"
    return {
        model: hashlib.sha256(
            b"".join(
                file.read_bytes()
                for file in sorted([*folder.glob(f"{model}/*.safetensors"), *folder.glob(f"optimizer/{model}-*")])
            )
        ).hexdigest()
        for model in ("actor", "critic", "draft")
        if (folder / model).is_dir()
    }


def loaded_bytes(run_dir: Path) -> int:
    """Return the bytes that generation workers loaded with each version."""
    spans = [event for event in json.loads((run_dir / "timeline.json").read_text()) if event["name"] == "load-weights"]
    [size] = {int(span["args"]["bytes"]) for span in spans if "copy_seconds" in span["args"]}
    return size


@pytest.mark.timeout(1800)
def test_a_draft_model_changes_no_weight_and_is_the_same_after_a_killed_rank(tmp_path: Path) -> None:
    manifest = job_with_a_draft_model(tmp_path)
    without = run_job(manifest, tmp_path / "without", settings=(f"{DRAFT_MODEL}.train=Disabled",))
    trained = run_job(manifest, tmp_path / "trained")
    kills = Kills(1, 1, ("training-1",), first=("training-1",), longest_calm_seconds=0.1, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", kills=kills)
    plain, ours, again = (digests(run.run_dir) for run in (without, trained, killed))
    assert set(plain) == {"actor", "critic"}
    assert {model: ours[model] for model in plain} == plain
    assert again == ours, str(killed)
    lines = trained.lines
    assert all(line["speculation/drafted"] > 0 for line in lines)
    published = lines[0]["training/draft/published_bytes"]
    assert loaded_bytes(trained.run_dir) == loaded_bytes(without.run_dir) + published
    assert all(line["training/draft/seconds"] > 0 and line["training/draft/published_bytes"] > 0 for line in lines)
    assert lines[-1]["training/draft/divergence"] < lines[0]["training/draft/divergence"]
    folder = tmp_path / "trained" / "checkpoints" / f"iteration-{ITERATIONS:06d}" / "draft"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size == models.VOCABULARY
