"""A small manifest whose model is a safetensors header of 1,000 parameters, and `rlhf` called as from a shell."""

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli import main as command_line

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def write_header_job(folder: Path, spec: Mapping[str, Any]) -> Path:
    """Write model, reward, prompts and job.yaml; return the manifest."""
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text(json.dumps(CONFIG))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 100], "data_offsets": [0, 4000]}}).encode()
    (folder / "policy" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "reward.py").write_text("def score(prompt, response, record): return 1.0\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    document = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def rlhf(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `rlhf`; return the exit code."""
    monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return int(ended.value.code or 0)
