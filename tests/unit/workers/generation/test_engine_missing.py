"""A worker whose image lacks the job's engine reports it, and names an image that has the engine."""

import sys
from pathlib import Path

import pytest
import torch
from tests.support.workers.generation_roles import generation_job

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine_registry import build_engine


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        ("import math\nmath.no_such_function", "EngineUnavailable", "cannot be loaded: .*no_such_function"),
        ("import sys\nsys.exit(2)", "EngineUnavailable", "cannot be loaded: .*SystemExit: 2"),
        ("build = 1", "EngineUnavailable", "has no build_engine"),
        ("def build_engine(*_):\n    raise SystemExit(4)", "EngineInvalid", "exited: .*in build_engine: SystemExit: 4"),
    ],
)
def test_a_module_of_an_engine_that_cannot_be_used_says_why(
    code: str, reason: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "engines_of_a_user").mkdir()
    (tmp_path / "engines_of_a_user/first.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("engines_of_a_user", "engines_of_a_user.first"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    job = generation_job(tmp_path, deterministic=False, engine="engines_of_a_user.first")
    with pytest.raises(WorkError, match=says) as raised:
        build_engine(job.spec, None, torch.device("cpu"))
    assert (raised.value.failure.reason, raised.value.failure.field) == (reason, "spec.generation.engine")


@pytest.mark.parametrize("found", [False, True], ids=["no package", "a package that cannot be imported"])
def test_a_worker_without_vllm_names_the_image_that_has_it(
    found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("rlhf_workers.generation.vllm_engine")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # what an import finds where it is not installed
    monkeypatch.setattr("rlhf_workers.generation.engine_registry.installed", lambda: found)
    with pytest.raises(
        WorkError, match="vLLM is not installed in this worker's image: use the worker image that has it"
    ) as raised:
        build_engine(generation_job(tmp_path, deterministic=False, engine="vllm").spec, None, torch.device("cpu"))
    failure = raised.value.failure
    assert (failure.reason, failure.field) == ("EngineUnavailable", "spec.generation.engine")
    assert failure.exit_code == ExitCode.USAGE
    assert not failure.retryable
