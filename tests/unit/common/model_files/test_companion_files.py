"""Checkpoints and exports contain all files of a model besides its weights, and no others."""

import json
from pathlib import Path

import pytest
import transformers
from tests.support.model_folders.models import build_tokenizer, write_policy
from tests.support.workers.checkpoint_folders import part

from rlhf_common import control_pb2 as pb
from rlhf_common.model_files import companion_files as companions
from rlhf_common.model_files.companion_files import companion_files
from rlhf_common.model_files.weight_files import FolderError
from rlhf_coordinator.storage import checkpoint

FILES = (
    "generation_config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json", "LICENSE",
    "NOTICE.txt", "USE_POLICY.md", "README.md", "modeling_own.py", "merges.txt", "tokenizer.model", "qwen.tiktoken",
    "own_code/__init__.py", "own_code/layers.py", "custom_generate/generate.py", "1_Pooling/config.json",
)  # fmt: skip
LEFT_OUT = (
    ".git/config", ".cache/huggingface/x.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf",
    "checkpoint-500/config.json", "checkpoint-500/model.safetensors", "original/params.json",
    "original/consolidated.00.pth", "onnx/config.json", "onnx/model.onnx", "runs/events.out.tfevents.1",
    "adapter_config.json", "hf_quant_config.json", "__pycache__/modeling_own.json", "optimizer.pt",
)  # fmt: skip


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(name))


def full_folder(folder: Path) -> Path:
    """Create a model with several chat templates and every kind of companion file."""
    write_policy(folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(folder)
    put(folder, *FILES, *LEFT_OUT)
    return folder


def test_a_checkpoint_has_every_file_of_the_model_and_loads_as_it_did(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "model")
    temporary = checkpoint.prepare(tmp_path / "checkpoints", 1)
    weights = part(temporary, "actor/model-stage-00000.safetensors", b"weights", "actor", ("a",))
    result = pb.CheckpointResult(files=[weights])
    sources = {"actor": checkpoint.SourceFolder(str(folder), "spec.models.actor.path")}
    finished = checkpoint.finish(temporary, tmp_path / "checkpoints", 1, [result], sources, {})
    actor = finished.folder / "actor"
    names = {str(item.relative_to(actor)) for item in actor.rglob("*") if item.is_file()}
    assert names >= {*FILES, "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"}
    assert not names & set(LEFT_OUT)
    loaded, source = (transformers.AutoTokenizer.from_pretrained(place) for place in (actor, folder))
    assert loaded.chat_template == source.chat_template
    assert set(loaded.chat_template) == {"default", "tool_use", "rag"}
    described = json.loads((finished.folder / "checkpoint.json").read_text())["files"]
    assert "actor/additional_chat_templates/rag.jinja" in described
    assert checkpoint.verify(finished.folder) is None


def test_links_lead_nowhere_but_to_files_of_their_kind(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "model"
    put(outside, "secret", "token.pem", "tokenizer.json", "deep/x.json")
    put(folder, "config.json", "sub/kept.json")
    (folder / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    (folder / "alias.json").symlink_to("config.json")
    (folder / "secret").symlink_to(outside / "secret")
    (folder / "secret.json").symlink_to(outside / "secret")
    (folder / "token.pem").symlink_to(outside / "token.pem")
    (folder / "deep").symlink_to(outside / "deep")
    (folder / "sub/tokenizer.json").symlink_to(outside / "tokenizer.json")
    (folder / "dangling.json").symlink_to("/nowhere")
    (folder / "loop").symlink_to(folder)
    assert companion_files(folder) == ["alias.json", "config.json", "sub/kept.json", "tokenizer.json"]


def test_the_cache_of_the_hub_is_links_and_is_taken_whole(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--team--m" / "snapshots" / "1"
    put(tmp_path / "models--team--m" / "blobs", "aa", "bb")
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/bb")
    assert companion_files(snapshot) == ["additional_chat_templates/rag.jinja", "config.json"]


def test_what_would_swell_every_checkpoint_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "config.json", "b.json")
    (tmp_path / "data.jsonl").write_bytes(bytes(1000))
    assert "data.jsonl" in companion_files(tmp_path)
    for bound, value in (("MAX_BYTES", 999), ("MAX_FILES", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(companions, bound, value)
            with pytest.raises(FolderError, match=r"the largest is data.jsonl: move away"):
                companion_files(tmp_path)
