"""The machinery of `scripts/gpu-check`: limits that no step escapes, results, and suitable wheels."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from gpu_check import installed_wheels, prepare, results, runner

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "scripts"), "PATH": "/usr/bin:/bin"}
ABOUT = {"started": "now", "source": "commit a", "machine": {}, "small": False, "budget_seconds": 9.0, "seconds": 5.0}


def test_the_steps_are_the_files_of_their_folder() -> None:
    files = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert sorted(f"test_{name}.py" for name in runner.STEPS) == sorted(files)


def test_a_step_that_is_none_is_named() -> None:
    command = [str(ROOT / "scripts" / "gpu-check"), "--steps", "machine,decod"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "'decod' is no step; there are: machine" in ran.stderr


HANGS = """
import os, pathlib, time
from gpu_check.results import Results

folder = pathlib.Path(__file__).parent
Results(folder).put("hangs", "running", "", 0, figures={"a": {"value": 1, "unit": "s"}}, limit_seconds=1)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
RUNS = """
import pathlib, sys
from gpu_check import runner

folder = pathlib.Path(__file__).parent
runner.pytest_of = lambda file, output, options: [sys.executable, str(folder / file.name.removeprefix("test_"))]
runner.GRACE_SECONDS = 1
options = runner.Options(True, "cpu", 200.0)
sys.exit(runner.run_steps(("hangs", "dies"), folder, folder, folder, folder, options))
"""


def test_a_step_that_dies_or_hangs_is_named_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Includes a grandchild that left the process group, and whose parent is gone."""
    for name, program in {"hangs": HANGS, "dies": "import os\nos.abort()", "runs": RUNS}.items():
        (tmp_path / f"{name}.py").write_text(program)
    command = [sys.executable, str(tmp_path / "runs.py")]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    steps = results.Results(tmp_path).steps
    assert steps["hangs"]["why"] == "killed at its limit of 1 s; what it measured before is there"
    assert steps["hangs"]["figures"] == {"a": {"value": 1, "unit": "s"}}
    assert steps["dies"]["why"] == "its process ended with status -6 and no last word; see the log"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


STEPS = {
    "differs": "figures.check('tokens', False, '2 of 3 differ')\n    figures.check('bits', True, '3 of 3')",
    "is_not_for_here": "pytest.skip('needs a GPU')",
    "is_silent": "pass",
    "passes": "figures.add('rate', 3.14159265, 'GB/s')\n    figures.row('decode', batch=1, seconds=float('nan'))",
    "raises": "raise ValueError('no')",
}


def ended(folder: Path, seconds_left: int) -> dict[str, dict[str, Any]]:
    """Return the status of the steps in a folder, in a process with this much left of the budget."""
    results.Results(folder, ABOUT).write()
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "gpu_check.plugin", f"--figures={folder}"]
    command += ["--device=cpu", f"--seconds-left={seconds_left}", "-o", "timeout=600", str(folder)]
    ran = subprocess.run(command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=300)
    steps = results.Results(folder).steps
    assert list(steps) == list(STEPS), ran.stdout + ran.stderr
    return steps


@pytest.mark.full
def test_how_a_step_ended_and_what_it_said_is_in_the_file(tmp_path: Path) -> None:
    test = '@pytest.mark.gpu(seconds=60, gigabytes=20)\ndef test_it(machine, figures):\n    """Shows\n    it."""'
    for name, body in STEPS.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{test}\n    {body}\n")
    steps = ended(tmp_path, seconds_left=1000)
    assert {name: (step["status"], step["why"]) for name, step in steps.items()} == {
        "differs": ("failed", "1 of 2 checks failed: tokens"),
        "is_not_for_here": ("not here", "needs a GPU"),
        "is_silent": ("failed", "it said nothing"),
        "passes": ("passed", ""),
        "raises": ("failed", "ValueError: no"),
    }
    assert steps["passes"]["shows"] == "Shows it"
    assert steps["passes"]["figures"] == {"rate": {"value": 3.1416, "unit": "GB/s"}}
    assert steps["passes"]["tables"] == {"decode": [{"batch": 1, "seconds": "nan"}]}
    assert steps["differs"]["checks"][0] == {"name": "tokens", "passed": False, "found": "2 of 3 differ"}
    left_out = {(step["status"], step["why"]) for step in ended(tmp_path, seconds_left=80).values()}
    assert left_out == {("left out", "80 s of the budget were left, its limit is 180 s")}


def test_the_page_says_how_steps_ended_and_what_they_measured(tmp_path: Path) -> None:
    run = results.Results(tmp_path, ABOUT)
    checks = [{"name": "tokens", "passed": False, "found": "2 of 3"}]
    tables = {"steps": [{"way": "a|b", "seconds": 1.5}, {"way": "c", "share": 0.5}]}
    run.put("decode", "failed", "1 of 1 checks failed", 2.0, shows="tokens", checks=checks, tables=tables)
    run.put("weights", "passed", "", 1.0, figures={"rate": {"value": 3, "unit": "GB/s"}})
    run.write_page()
    page = (tmp_path / "gpu-check.md").read_text()
    assert "| `decode` | tokens | **FAILED**: 1 of 1 checks failed | 2 |" in page
    assert "- **FAILED**: tokens: 2 of 3" in page
    assert "| way | seconds | share |\n|---|---|---|\n| a/b | 1.5 |  |\n| c |  | 0.5 |" in page
    assert "## weights\n\n| figure | value | unit |\n|---|---|---|\n| rate | 3 | GB/s |" in page
    assert "Took 5 s in all; 1 failed, 1 passed" in page


def test_wheels_are_those_of_the_lock_for_the_python_asked_for() -> None:
    packages = prepare.locked(tomllib.loads((ROOT / "uv.lock").read_text()), "3.12")
    missing = prepare.needed(packages, "3.12", prepare.read_have(ROOT / "scripts" / "gpu_check" / "bare_machine.txt"))
    assert {"pydantic", "pydantic-core", "grpcio", "cryptography", "ortools", "pytest"} <= set(missing)
    assert not {"torch", "kopf", "kubernetes", "numpy", "ruff", "rlhf-operator"} & set(missing)
    chosen = [prepare.choose(packages[name], prepare.tags_of("3.12"))[0] for name in missing]
    assert all("cp312-cp312-" in file or "-abi3-" in file or file.endswith("none-any.whl") for file in chosen), chosen
    everything = prepare.needed(packages, "3.12", frozenset({"transformers", "torch"}))
    assert {"numba", "numpy", "matplotlib"} <= set(everything) - set(missing)


def test_what_is_left_out_where_all_would_be_too_large_is_what_the_project_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"llvmlite": 6_000_000, "numba": 1_000_000, "matplotlib": 2_000_000}

    def fetched(root: Path, package: dict[str, Any], tags: object, python: str, folder: Path) -> Path:
        path = folder / f"{package['name']}-1-py3-none-any.whl"
        path.write_bytes(b"x" * sizes.get(package["name"], 10))
        return path

    monkeypatch.setattr(prepare, "fetch", fetched)
    monkeypatch.setattr(prepare, "requirements_of", lambda wheel: [])
    monkeypatch.setattr(prepare, "LIMIT_MEGABYTES", 3)
    have = tmp_path / "have.txt"
    have.write_text("torch\ntransformers\n")
    assert prepare.prepare(ROOT, tmp_path, "3.12", have) == 0
    brought = {path.name.partition("-1-")[0] for path in (tmp_path / "wheels").iterdir()}
    assert {"matplotlib", "tensorboard", "pytest", "ortools"} <= brought
    assert not {"numba", "llvmlite"} & brought
    assert "left out, as all would be too large: numba; without it schedules are" in capsys.readouterr().out


def test_the_project_asks_for_what_its_generated_code_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {Requirement(text).name: next(iter(Requirement(text).specifier)) for text in project["dependencies"]}
    for name, (file, pattern) in prepare.GENERATED.items():
        found = re.search(pattern, (ROOT / file).read_text())
        assert found is not None
        assert Version(bounds[name].version) >= Version(found[1]), name


@pytest.mark.parametrize(
    ("stem", "fits"),
    [("a-1-py3-none-any", True), ("a-1-cp39-abi3-manylinux2014_x86_64", True), ("a-1-cp27-cp27m-linux", False)],
)
def test_a_wheel_of_another_python_is_not_used(stem: str, fits: bool) -> None:
    assert installed_wheels.fits(stem.split("-")[-3], stem) is fits
