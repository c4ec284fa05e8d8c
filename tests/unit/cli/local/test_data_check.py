"""`rlhf validate --for local` judges prompts, tokenizer and configuration like the start of the job."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.model_folders.models import build_config
from tests.support.model_folders.special_tokens import tokenizer_that_writes
from transformers import AutoModelForCausalLM

from rlhf_cli.load_job import Target
from rlhf_cli.validate import validate

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: tiny}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: policy}, reward: {function: {module: rewards}}}
  prompts: {path: prompts.jsonl}
  rollout: {maxPromptTokens: 16, maxResponseTokens: 16}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the manifest next to its files; the policy has no embedding for the token <tag>."""
    tokenizer = tokenizer_that_writes("$A", "<tag>")
    vocabulary = tokenizer.convert_tokens_to_ids("<tag>")
    config = build_config("llama", vocab_size=vocabulary, max_position_embeddings=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "job.yaml").write_text(MANIFEST)
    return tmp_path


def problems_of(folder: Path, *, valid: bool) -> list[dict[str, Any]]:
    out = io.StringIO()
    code = validate(folder / "job.yaml", target=Target.LOCAL, as_json=True, console=Console(file=out))
    report = json.loads(out.getvalue())
    assert (code, report["valid"]) == (0 if valid else 2, valid)
    found: list[dict[str, Any]] = report["problems"]
    return found


def test_a_job_whose_data_are_right_has_no_problem(folder: Path) -> None:
    assert problems_of(folder, valid=True) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "1<tag>"}, "prompts.jsonl line 2 has the token '<tag>' under 'prompt', whose id is"),
        ({"prompt": "1\ud83d"}, "prompts.jsonl line 2 has half a surrogate pair under 'prompt'"),
        ({"prompt": "1" * 17}, "prompts.jsonl line 2 has 17 tokens, rollout.maxPromptTokens is 16"),
        ({"question": "1"}, "prompts.jsonl line 2 has no key 'prompt'"),
    ],
)
def test_a_bad_line_is_found_without_weights(folder: Path, line: dict[str, str], words: str) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(line))
    [problem] = problems_of(folder, valid=False)
    assert (problem["field"], problem["line"]) == ("spec.prompts.path", 8)
    assert words in problem["message"]


def test_a_context_that_is_too_short_is_found_without_weights(folder: Path) -> None:
    (folder / "job.yaml").write_text(MANIFEST.replace("maxResponseTokens: 16", "maxResponseTokens: 17"))
    [problem] = problems_of(folder, valid=False)
    assert (problem["field"], problem["line"]) == ("spec.rollout.maxResponseTokens", 9)
    assert "= 33 is more than the 32 positions of the model; the longest prompt," in problem["message"]
    assert "prompts.jsonl line 1, has 4 tokens" in problem["message"]


def test_prompts_of_an_evaluation_are_read_too(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        MANIFEST + "  evaluation: {every: 1, promptCount: 1, prompts: {path: held.jsonl}}\n"
    )
    (folder / "held.jsonl").write_text('{"prompt": "<tag>"}\n')
    [problem] = problems_of(folder, valid=False)
    assert "held.jsonl line 1 has the token '<tag>' under 'prompt'" in problem["message"]


def test_what_the_start_would_warn_of_is_a_warning(folder: Path) -> None:
    tokenizer = tokenizer_that_writes("$A", "<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer.save_pretrained(folder / "policy")
    (folder / "job.yaml").write_text(MANIFEST.replace("prompts.jsonl", "prompts.jsonl, chatTemplate: true"))
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}')
    AutoModelForCausalLM.from_config(build_config("llama", vocab_size=64)).save_pretrained(folder / "policy")
    [problem] = problems_of(folder, valid=True)
    assert problem["severity"] == "warning"
    assert "ends a turn with '<end>', and generation stops only at '<eos>'" in problem["message"]


@pytest.mark.parametrize("missing", ["prompts.jsonl", "policy"])
def test_a_file_that_is_not_here_is_a_warning(folder: Path, missing: str) -> None:
    (folder / missing).rename(folder / "elsewhere")
    [problem] = problems_of(folder, valid=True)
    assert problem["severity"] == "warning"
    assert "data were not checked" in problem["message"]


def test_a_policy_without_a_tokenizer_is_a_warning_and_one_that_is_damaged_an_error(folder: Path) -> None:
    (folder / "policy" / "tokenizer.json").write_text("{")
    [problem] = problems_of(folder, valid=False)
    assert problem["field"] == "spec.models.actor.path"
    for file in (folder / "policy").glob("*token*"):
        file.unlink()
    [problem] = problems_of(folder, valid=True)
    assert "its tokenizer cannot be loaded" in problem["message"]


def test_a_folder_that_is_no_model_is_an_error(folder: Path) -> None:
    (folder / "policy" / "config.json").unlink()
    [problem] = problems_of(folder, valid=False)
    assert (problem["field"], problem["line"]) == ("spec.models.actor.path", 7)
