"""What runs the steps of `scripts/gpu-check`: limits that nothing escapes, pages, and wheels of the right kind."""

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from gpu_check import installed_wheels, page, prepare, results, runner, step  # noqa: E402


def gpu_check(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "scripts" / "gpu-check"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_step_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Also a grandchild that left the process group, and whose parent is gone; and one that is over its limit."""
    pid = tmp_path / "pid"
    escapes = "import os, time; os.fork() and os._exit(0); os.setsid(); "
    escapes += f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"""
        import contextlib, os, pathlib, sys
        from gpu_check.processes import adopt_orphans, run_limited

        def until_it_escaped():
            if pathlib.Path({str(pid)!r}).exists() and pathlib.Path({str(pid)!r}).read_text():
                raise KeyboardInterrupt

        adopt_orphans()
        step = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
        with contextlib.suppress(KeyboardInterrupt):
            run_limited([sys.executable, "-c", step, {escapes!r}], os.environ, 100, print, until_it_escaped)
        print(run_limited(["sleep", "600"], os.environ, 0.1, print, lambda: None))
    """
    environment = {"PYTHONPATH": str(ROOT / "scripts"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert ran.stdout == "None\n", ran.stderr
    assert not Path("/proc", pid.read_text()).exists()


@pytest.mark.parametrize(
    ("said", "exit_status", "ended", "words"),
    [
        ({"ended": "done", "figures": {"x": {"value": 1, "unit": ""}}}, 0, "passed", ""),
        (
            {"ended": "done", "checks": [{"name": "tokens", "passed": False}]},
            0,
            "failed",
            "1 of 1 checks failed: tokens",
        ),
        ({"ended": "not here", "why": "needs a GPU"}, 0, "not here", "needs a GPU"),
        ({"ended": "raised", "why": "ValueError: no"}, 0, "failed", "ValueError: no"),
        ({"checks": [{"name": "a", "passed": True}]}, None, "failed", "killed at its limit of 30 s"),
        ({}, -11, "failed", "status -11"),
        ({"ended": "done"}, 0, "failed", "it said nothing"),
    ],
)
def test_how_a_step_ended(said: dict[str, object], exit_status: int | None, ended: str, words: str) -> None:
    status, why = results.verdict(said, exit_status, 30)
    assert status == ended
    assert words in why


def test_what_a_step_said_is_on_disk_at_once(tmp_path: Path) -> None:
    report = step.Report(tmp_path / "report.json")
    report.figure("rate", 3.14159265, "GB/s")
    assert json.loads((tmp_path / "report.json").read_text())["figures"] == {"rate": {"value": 3.1416, "unit": "GB/s"}}
    report.row("decode", batch=1, seconds=float("nan"))
    report.check("same tokens", False, "2 of 3 differ")
    shown = json.loads((tmp_path / "report.json").read_text())
    assert shown["tables"] == {"decode": [{"batch": 1, "seconds": "nan"}]}
    assert shown["checks"] == [{"name": "same tokens", "passed": False, "found": "2 of 3 differ"}]


MACHINE = {"device": "cpu", "name": "a processor", "memory_bytes": 24e9, "gpus": 0, "cores": 2, "versions": {}}
DECODE = {"name": "decode", "shows": "tokens", "limit_seconds": 60, "small_limit_seconds": 30}


def test_steps_that_are_not_run_say_why_and_the_page_goes_into_a_document(tmp_path: Path) -> None:
    options = runner.Options(ROOT, tmp_path, tmp_path, tmp_path, (), small=True, device="cpu", budget_seconds=10)
    run = runner.Run(options)
    run.results.about["machine"] = MACHINE
    run.step(DECODE | {"needs_gpu": False, "gpu_gigabytes": 0}, MACHINE, small=True)
    run.step(DECODE | {"name": "graphs", "needs_gpu": True, "gpu_gigabytes": 0}, MACHINE, small=True)
    run.step({"name": "moves", "broken": "ImportError: no module"}, MACHINE, small=True)
    run.close()
    found = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]
    assert {name: one["status"] for name, one in found.items()} == {
        "decode": "left out",
        "graphs": "not here",
        "moves": "failed",
    }
    assert found["decode"]["why"].endswith("s of the budget were left, its limit is 30 s")
    assert found["graphs"]["why"] == "needs a GPU"
    document = tmp_path / "gpu.md"
    document.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    for _ in range(2):
        assert gpu_check("page", tmp_path / "gpu-check.json", "--into", document).returncode == 0
    text = document.read_text()
    assert text.startswith(f"before\n{page.BEGIN}\n")
    assert text.endswith(f"{page.END}\nafter\n")
    assert text.count("| `graphs` | tokens | not here: needs a GPU |") == 1
    assert "old" not in text
    with pytest.raises(ValueError, match="must have the lines"):
        page.put_into("no markers", text)


def test_runs_of_one_machine_make_one_page() -> None:
    one = {"source": "commit a", "machine": MACHINE, "small": False, "seconds": 500.0, "started": "now"}
    first = one | {"steps": {"machine": {"status": "passed"}, "decode": {"status": "left out"}}}
    second = one | {"seconds": 60.0, "steps": {"decode": {"status": "failed"}, "machine": {"status": "left out"}}}
    both = page.merged([first, second])
    assert {name: found["status"] for name, found in both["steps"].items()} == {"machine": "passed", "decode": "failed"}
    assert both["seconds"] == 560.0
    with pytest.raises(ValueError, match="machine differs"):
        page.merged([first, second | {"machine": MACHINE | {"cores": 3}}])


def test_steps_of_several_sources_name_their_own() -> None:
    passed = {"status": "passed", "why": "", "seconds": 1.0, "figures": {"one": {"value": 1, "unit": "s"}}}
    known, other = (MACHINE | {"versions": {"torch": version}} for version in ("2.11", "3.0"))
    one = {"source": "commit a", "machine": known, "small": False, "seconds": 5.0, "started": "noon"}
    runs = [
        one | {"steps": {"machine": passed}},
        one | {"source": "commit b", "machine": other, "steps": {"decode": passed}},
    ]
    text = page.page_of(page.merged(runs))
    assert "- Source: several: each step names its own" in text
    assert "Source: commit a, noon." in text
    assert "Source: commit b, noon." in text
    assert "torch 2.11 or 3.0" in text


def test_a_step_that_is_none_is_named() -> None:
    ran = gpu_check("--steps", "machine,decod")
    assert ran.returncode == 1
    assert "'decod' is no step; there are: machine" in ran.stderr


def test_wheels_are_those_of_the_lock_for_the_python_asked_for() -> None:
    packages = prepare.locked(tomllib.loads((ROOT / "uv.lock").read_text()), "3.12")
    missing = prepare.needed(packages, "3.12", prepare.read_have(ROOT / "scripts" / "gpu_check" / "bare_machine.txt"))
    assert {"pydantic", "pydantic-core", "grpcio", "cryptography", "ortools"} <= set(missing)
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
