"""No algorithm, model role or field of a sample is named outside the modules that define it.

Other code asks the graph of the job (`rlhf_api.algorithms`), so that a new algorithm, role or field is one module. The
test reads the syntax of every module: string constants, members of the enums, and imports of an algorithm's own
module.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.support.syntax import nodes

from rlhf_api.algorithms import ALGORITHMS, ModelRole, SampleField

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common/rlhf_common", "api/rlhf_api", "planner/rlhf_planner", "coordinator/rlhf_coordinator",
            "operator/rlhf_operator", "cli/rlhf_cli", "workers/rlhf_workers")  # fmt: skip
DEFINITIONS = ("api/rlhf_api/algorithms/", "workers/rlhf_workers/algorithms/", "api/rlhf_api/job/models.py")
"""Files and folders that define them."""
NAMES = {*map(str, ModelRole), *map(str, SampleField), *ALGORITHMS}
ENUMS = {"ModelRole", "SampleField"}
METRIC = "a metric's or a column's name"
REWARD_SOURCE = "the member of spec.models, or a message of its user code"
WORK = "an attribute or a counter of work"
PAPER = "a pipeline of the paper's instances"
OTHER_MEANINGS = {
    "common/rlhf_common/metrics/": ({"reward", "tokens"}, METRIC),
    "api/rlhf_api/rules/failure.py": ({"values"}, "values of exit codes"),
    "planner/rlhf_planner/schedule/tables.py": ({"actor", "critic"}, PAPER),
    "coordinator/rlhf_coordinator/evaluation/": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/job/summary.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/job/iteration_metrics.py": ({"reward", "tokens"}, METRIC),
    "coordinator/rlhf_coordinator/loop/actions.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/reports/": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/run_page/": ({"reward", "tokens"}, METRIC),
    "coordinator/rlhf_coordinator/service/last_report.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/service/prometheus.py": ({"tokens"}, METRIC),
    "coordinator/rlhf_coordinator/state/evaluation_state.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/storage/checkpoint.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/training/checkpoint_saver.py": ({"reward"}, METRIC),
    "coordinator/rlhf_coordinator/training/schedule_": ({"cost"}, "what a stage takes"),
    "operator/rlhf_operator/manifests/": ({"reward"}, REWARD_SOURCE),
    "operator/rlhf_operator/manifests/pod_rules.py": ({"reference"}, "the name of an image"),
    "operator/rlhf_operator/reconcile/job_status.py": ({"reward"}, METRIC),
    "cli/rlhf_cli/": ({"reward"}, METRIC),
    "cli/rlhf_cli/samples.py": ({"tokens"}, METRIC),
    "workers/rlhf_workers/generation/migration/kv_chunks.py": ({"values"}, "keys and values of a cache"),
    "workers/rlhf_workers/inference/incremental_scoring.py": ({"tokens"}, WORK),
    "workers/rlhf_workers/inference/inference_role.py": ({"tokens"}, WORK),
    "workers/rlhf_workers/training/cost_profile.py": ({"tokens"}, "a field of a document of costs"),
    "workers/rlhf_workers/generation/environment/": ({"reward"}, REWARD_SOURCE),
    "workers/rlhf_workers/inference/rewards/": ({"reward"}, REWARD_SOURCE),
}
"""File or folder -> (names that it uses in another sense, that sense)."""


def found_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what) of every name in a module, except docstrings."""
    tree = ast.parse(path.read_text())
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ENUMS:
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            package, _, last = node.module.rpartition(".")
            if package.endswith(".algorithms") and last in ALGORITHMS:
                yield node.lineno, f"import of {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr in ALGORITHMS:
            yield node.lineno, f".{node.attr}"


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (path in the repository, file) of every module that defines none of them."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if not name.startswith(DEFINITIONS) and "_pb2" not in name:
                yield name, file


@cache
def used() -> list[tuple[str, int, str]]:
    """Return (path in the repository, line, what) of every name in these modules."""
    return [(name, line, word) for name, file in modules() for line, word in found_in(file)]


def allowed(name: str) -> set[str]:
    """Return the names that a module may use in another sense."""
    return set().union(*(names for place, (names, _) in OTHER_MEANINGS.items() if name.startswith(place)))


def test_nobody_knows_an_algorithm_a_role_or_a_field_by_its_name() -> None:
    uses = [f"{name}:{line}: {word}" for name, line, word in used() if word not in allowed(name)]
    assert not uses, "ask the graph of the job instead:\n" + "\n".join(uses)


def test_no_exception_outlives_its_reason() -> None:
    for place, (names, _) in OTHER_MEANINGS.items():
        assert names <= {word for name, _, word in used() if name.startswith(place)}, place


@pytest.mark.parametrize(
    "code",
    [
        'if task.model == "critic": pass',
        "if role is ModelRole.CRITIC: pass",
        "x = sample.fields[SampleField.REWARD]",
        "from rlhf_api.algorithms.ppo import PPO",
        "x = spec.algorithm.grpo",
    ],
)
def test_what_is_looked_for_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(found_in(tmp_path / "module.py"))
