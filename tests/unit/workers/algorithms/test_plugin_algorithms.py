"""A plug-in is checked when it is loaded and at every call: errors name the place, the value and valid values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.algorithms import REINFORCE
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_common.names import ExitCode
from rlhf_workers.algorithms.base import Algorithm
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.training_batch import MicroBatch, micro_batch

CPU = torch.device("cpu")
START = REINFORCE.read_text()


def built(folder: Path, file: Path, **fields: Any) -> Algorithm:
    plugin = {"file": str(file), "name": "Reinforce", "samplesPerPrompt": 1, "miniBatchSize": 8, **fields}
    job = make_job(folder, folder, algorithm={"plugin": plugin})
    return build_algorithm(job.spec, CPU)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    assert old in START
    file = tmp_path / "mine.py"
    file.write_text(START.replace(old, new))
    return file


def losses_of(algorithm: Algorithm) -> Any:
    ready = algorithm.prepare(make_batch())
    rows = [0, 1]
    microbatch: MicroBatch = micro_batch(ready, rows, algorithm.token_weights(ready, rows))
    log_p = torch.full((len(microbatch.targets),), -1.0, requires_grad=True)
    return algorithm.policy_loss(log_p, torch.ones_like(log_p), microbatch)


def test_parameters_come_from_the_manifest_and_the_baseline_moves(folder: Path) -> None:
    algorithm, batch = built(folder, REINFORCE, parameters={"momentum": 0.5}), make_batch()
    mean = float(batch.rewards.mean())
    first = algorithm.prepare(batch).fields["advantages"]
    assert torch.allclose(first[:, 0], batch.rewards - mean)
    assert algorithm.state()["baseline"] == pytest.approx(mean)
    metrics: dict[str, float] = {}
    algorithm.finish_iteration(metrics)
    assert metrics == {"reinforce/baseline": pytest.approx(mean)}
    loss, clipped = losses_of(algorithm)
    assert loss.requires_grad
    assert clipped is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("class Reinforce(Algorithm)", "class Other(Algorithm)", r"no class Reinforce .* it has Other"),
        ("class Reinforce(Algorithm)", "class Reinforce", r"no class Reinforce derived from .*Algorithm; it has none"),
        ("import torch", "import torch_that_is_not_there", r"cannot be imported: .*No module named"),
        ("import torch", "raise SystemExit(3)", r"cannot be imported: .*SystemExit"),
        (
            "self.baseline: float",
            "self.baseline: float = [][0]\n        self.other: float",
            r"mine\.py:\d+: IndexError",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(WorkError, match=says) as caught:
        built(folder, changed(tmp_path, old, new))
    assert caught.value.failure.exit_code == ExitCode.USER_CODE
    assert caught.value.failure.field.startswith("spec.algorithm.plugin.")


def test_a_file_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=r"plugin\.file: .*nothing\.py: there is no such file"):
        built(folder, tmp_path / "nothing.py")
    plugin = {"module": "no_such_module", "name": "A", "samplesPerPrompt": 1, "miniBatchSize": 8}
    spec = make_job(folder, algorithm={"plugin": plugin}).spec
    with pytest.raises(WorkError, match=r"plugin\.module: no_such_module cannot be imported"):
        build_algorithm(spec, CPU)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return batch.with_fields(advantages=", "return dict(advantages=", r"prepare .*returned a dict; return batch"),
        (
            "with_fields(advantages=",
            "with_fields(advantage=",
            r"added the fields advantage; `prepared`",
        ),
        ("* batch.mask)", "* batch.mask * float('nan'))", r"field advantages holds a number that is not finite"),
        ("* batch.mask)", "* batch.mask.double() + 1e39)", r"field advantages holds a number that is not finite"),
        ("* batch.mask)", "* batch.mask[:1, :1].int())", r"field advantages is .* give floating numbers"),
        ("* log_p, None", "* log_p", r"policy_loss .*returned a Tensor; return \(loss per token"),
        ("* log_p, None", "@ log_p, None", r"the loss is torch.float32 \[\]; give one number per token"),
        ("* log_p, None", "* log_p.detach(), None", r"the loss has no gradient"),
        ("* log_p, None", "* log_p, True", r"give a bool tensor like the loss, or None"),
        ("-microbatch.fields", "-batch.fields", r"mine\.py:\d+: NameError"),
        ('microbatch.fields["advantages"]', 'microbatch.fields["values_"]', r"KeyError"),
    ],
)
def test_what_a_method_gives_back_is_checked(folder: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    algorithm = built(folder, changed(tmp_path, old, new))
    with pytest.raises(WorkError, match=says) as caught:
        losses_of(algorithm)
    assert caught.value.failure.exit_code == ExitCode.USER_CODE


def remembered(algorithm: Algorithm) -> dict[str, Any]:
    algorithm.finish_iteration({})
    return algorithm.state()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('{"baseline": self.baseline}', "[1]", r"state .*returned a list; return a dict"),
        ('{"baseline": self.baseline}', '{"a": {1, 2}}', r"state .*is no JSON"),
        ('{"baseline": self.baseline}', '{"a": "x" * 2_000_000}', r"bytes of JSON; return a dict of at most"),
        ("= self.baseline or 0.0", '= "much"', r"metric 'reinforce/baseline' is 'much'; give short names"),
        ("= self.baseline or 0.0", "= float('inf')", r"metric 'reinforce/baseline' is inf"),
        ("= self.baseline or 0.0", "= 10**400", r"metric 'reinforce/baseline' is 1000"),
    ],
)
def test_state_and_metrics_are_bounded(folder: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    algorithm = built(folder, changed(tmp_path, old, new))
    algorithm.prepare(make_batch())
    with pytest.raises(WorkError, match=says):
        remembered(algorithm)


def test_a_plugin_changes_nothing_but_the_fields_it_adds(folder: Path, tmp_path: Path) -> None:
    code = "(1 - self.momentum) * mean"
    meddles = f"{code}\n        batch = batch.with_fields(values=batch.mask * 9.0)"
    algorithm = built(folder, changed(tmp_path, code, meddles))
    batch = make_batch()
    assert torch.equal(algorithm.prepare(batch).fields["values"], batch.fields["values"])


@pytest.mark.parametrize("method", ["__init__", "prepare", "policy_loss", "batch_metrics"])
def test_an_exit_of_the_class_is_an_error_of_user_code(folder: Path, tmp_path: Path, method: str) -> None:
    leaves = f"\n\n    def {method}(self, *arguments):\n        raise SystemExit(3)\n"

    def run_all() -> None:
        algorithm = built(folder, changed(tmp_path, START, START + leaves))
        losses_of(algorithm)
        algorithm.batch_metrics(make_batch())

    with pytest.raises(WorkError, match=rf"Reinforce\.{method} in .*: SystemExit: 3; correct the code") as caught:
        run_all()
    assert caught.value.failure.exit_code == ExitCode.USER_CODE


def test_a_class_with_objectives_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    objectives = "\n\n    def objectives(self):\n        return {}\n"
    with pytest.raises(WorkError, match=r"Reinforce\.objectives .* is never called for a plug-in; define policy_loss"):
        built(folder, changed(tmp_path, START, START + objectives))


def test_shaped_rewards_of_the_class_are_reported_and_checked(folder: Path, tmp_path: Path) -> None:
    def shaped(expression: str) -> Algorithm:
        method = f"\n\n    def shaped_rewards(self, batch):\n        return {expression}\n"
        return built(folder, changed(tmp_path, START, START + method))

    batch = make_batch(abstained=(2,))
    assert torch.equal(built(folder, REINFORCE).shaped_rewards(batch)[batch.valid], batch.rewards[batch.valid])
    halved = shaped("(batch.rewards / 2).masked_fill(~batch.valid, torch.nan)").shaped_rewards(batch)
    assert torch.equal(halved[batch.valid], batch.rewards[batch.valid] / 2)
    for wrong, says in (
        ("batch.mask.float()", "give floating numbers"),
        ("batch.rewards / 0", "give finite numbers"),
        ("batch.rewards.double() * 0 + 1e39", "give finite numbers"),
    ):
        with pytest.raises(WorkError, match=f"Reinforce.shaped_rewards .*{says}"):
            shaped(wrong).shaped_rewards(batch)


def test_a_failure_in_a_module_names_its_file_and_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "of_user"
    package.mkdir()
    (package / "__init__.py").write_text("from of_user.core import Reinforce")
    (package / "core.py").write_text(START.replace("-microbatch.fields", "-batch.fields"))
    (package / "broken.py").write_text("\nlimit = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def of_module(module: str) -> Algorithm:
        plugin = {"module": module, "name": "Reinforce", "samplesPerPrompt": 1, "miniBatchSize": 8}
        return build_algorithm(make_job(folder, folder, algorithm={"plugin": plugin}).spec, CPU)

    for module in ("of_user", "of_user.core"):
        with pytest.raises(WorkError, match=rf"policy_loss in {module}: core\.py:\d+: NameError"):
            losses_of(of_module(module))
    with pytest.raises(WorkError, match=r"of_user\.broken cannot be imported: broken\.py:2: ZeroDivisionError"):
        of_module("of_user.broken")


def test_the_class_receives_the_number_of_the_iteration(folder: Path, tmp_path: Path) -> None:
    method = "\n\n    def begin_iteration(self, iteration):\n        self.baseline = 10.0 + iteration\n"
    algorithm = built(folder, changed(tmp_path, START, START + method))
    algorithm.begin_iteration(4)
    assert algorithm.state()["baseline"] == 14.0
