"""`rlhf validate`: exit code, a paragraph a problem, one JSON object for programs."""

import io
import json
from pathlib import Path

from manifest_cases import EXAMPLES, changed
from rich.console import Console

from rlhf_operator.cli.validate import validate


def run(path: Path, *, as_json: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    code = validate(path, as_json=as_json, console=Console(file=out, width=100, color_system=None))
    return code, out.getvalue()


def test_valid_manifest() -> None:
    code, out = run(EXAMPLES / "ppo.yaml")
    assert code == 0
    assert out.startswith("valid")
    assert "4 generation, 2 inference, 4 training" in " ".join(out.split())


def test_invalid_manifest_reads_as_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed("ppo", {"spec.rollout.batchSize": 100, "spec.models.reward.function.name": "[red]x"}, []))
    code, out = run(path)
    assert code == 2
    head, *paragraphs = out.strip().split("\n\n")
    assert "2 problems" in " ".join(head.split())
    name, batch = sorted(paragraphs)
    assert "[red]x" in name  # the value is shown as it is, never read as markup
    assert batch.splitlines()[0].startswith("spec.rollout.batchSize  line ")
    assert "given  100" in batch
    assert "use 64 or 128" in batch


def test_json_is_one_line_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed("grpo", {"spec.rollout.temperature": -1}, []))
    code, out = run(path, as_json=True)
    report = json.loads(out.splitlines()[-1])
    assert code == 2
    assert report["valid"] is False
    (problem,) = report["problems"]
    assert problem["field"] == "spec.rollout.temperature"
    assert problem["value"] == -1
    assert problem["line"] is not None
    assert "from 0 to 10" in problem["message"]
    code, out = run(EXAMPLES / "grpo.yaml", as_json=True)
    assert code == 0
    assert json.loads(out) == {"path": str(EXAMPLES / "grpo.yaml"), "valid": True, "problems": []}


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    code, out = run(tmp_path / "no.yaml")
    assert code == 2
    assert "cannot be read" in out
