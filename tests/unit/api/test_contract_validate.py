"""`rlhf validate`: exit code, one paragraph per problem, one JSON object for programs."""

import io
import json
from pathlib import Path

from rich.console import Console
from tests.support.manifests.manifest_cases import EXAMPLES, changed

from rlhf_cli.load_job import Target
from rlhf_cli.validate import validate


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
    assert "use 128" in batch


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
    named = {"index": 1, "object": "RLHFJob arithmetic-grpo", "checked": True, "valid": True}
    report = json.loads(out)
    assert report == {"path": str(EXAMPLES / "grpo.yaml"), "valid": True, "documents": [named], "problems": []}


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    code, out = run(tmp_path / "no.yaml")
    assert code == 2
    assert "cannot be read" in out


def test_every_document_of_a_file_is_named_with_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: files}\n"
    texts = [claim, changed("ppo", {}, []), changed("grpo", {"spec.rollout.batchSize": 100, "spec.seed": -1}, [])]
    path.write_text("---\n".join(texts))
    code, out = run(path)
    words = " ".join(out.split())
    assert code == 2
    assert f"not checked {path}, document 1 (PersistentVolumeClaim files)" in words
    assert f"valid {path}, document 2 (RLHFJob arithmetic-ppo)" in words
    assert f"invalid {path}, document 3 (RLHFJob arithmetic-grpo): " in words
    line = path.read_text().splitlines().index("  seed: -1") + 1
    assert f"spec.seed line {line}" in words
    report = json.loads(run(path, as_json=True)[1])
    assert [document["valid"] for document in report["documents"]] == [True, True, False]
    assert {problem["document"] for problem in report["problems"]} == {3}
    assert "spec.rollout.batchSize" in {problem["field"] for problem in report["problems"]}


def test_a_file_without_a_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "claim.yaml"
    path.write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\n")
    code, out = run(path)
    assert code == 2
    assert "holds no RLHFJob" in out


def test_warnings_are_told_and_do_not_change_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed("ppo", {"spec.training.optimizer.warmupSteps": 9999}, []))
    code, out = run(path)
    assert code == 0
    assert out.startswith("valid")
    assert "warning  spec.training.optimizer.warmupSteps" in out
    assert "the job has 800 optimizer steps" in " ".join(out.split())


def test_a_draft_model_that_is_trained_for_nobody_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    model = {"path": "draft", "train": "Enabled"}
    speculation = {"mode": "Disabled", "drafters": ["Model"], "draftModel": model}
    path.write_text(changed("ppo", {"spec.generation.speculation": speculation}, []))
    code, out = run(path)
    assert code == 0
    assert "warning  spec.generation.speculation.draftModel.train" in out
    path.write_text(changed("ppo", {"spec.generation.speculation": {**speculation, "mode": "Auto"}}, []))
    assert "warning" not in run(path)[1]


def test_what_pods_are_made_of_is_not_judged_for_a_local_run(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    template = {"spec": {"hostNetwork": True}}
    path.write_text(changed("ppo", {"spec.checkpoints.path": "out", "spec.generation.template": template}, []))
    assert run(path)[0] == 2
    assert validate(path, target=Target.LOCAL, console=Console(file=io.StringIO())) == 0
