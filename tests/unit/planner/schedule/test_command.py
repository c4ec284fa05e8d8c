"""`rlhf schedule` for people and programs: answers, pictures, the cache, and errors with exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_cli.schedule import app

INSTANCE = {
    "devices": 2,
    "pipelines": [
        {
            "name": "actor",
            "stageDevices": [0, 1],
            "microbatches": 3,
            "forward": 2,
            "backward": 4,
            "weightGradient": 2,
            "activation": 1.5,
        },
        {"name": "critic", "stageDevices": [1, 0], "microbatches": 3, "forward": 1, "backward": 2, "activation": 1},
    ],
}


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(INSTANCE))
    return path


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


def solve(instance: Path, *more: object) -> dict[str, Any]:
    code, output = invoke("solve", "--instance", instance, "--seconds", 0.2, "--json", *more)
    assert code == 0, output
    return dict(json.loads(output))


def test_solve_then_check(instance: Path, tmp_path: Path) -> None:
    answer = solve(instance, "--split-backward", "--memory-cap", 5)
    assert {"makespan", "lowerBound", "atBound", "peakActivation", "bubble", "seconds", "method", "baselines"} <= set(
        answer
    )
    assert set(answer["devices"][0][0]) == {"pipeline", "kind", "microbatch", "stage", "start", "end"}
    assert answer["lowerBound"] <= answer["makespan"] <= answer["baselines"]["serial-1f1b"]["makespan"]
    assert answer["peakActivation"] <= 5
    schedule = tmp_path / "schedule.json"
    schedule.write_text(json.dumps(answer))
    code, output = invoke("check", "--instance", instance, "--schedule", schedule, "--json")
    assert code == 0
    assert json.loads(output) == {
        "valid": True,
        "makespan": answer["makespan"],
        "peakActivation": answer["peakActivation"],
    }
    answer["devices"][0].pop()
    schedule.write_text(json.dumps(answer))
    code, output = invoke("check", "--instance", instance, "--schedule", schedule)
    assert code == 1
    assert "is missing" in output


def test_pictures_and_terminal(instance: Path, tmp_path: Path) -> None:
    for name, magic in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        solve(instance, "--picture", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    code, output = invoke("solve", "--instance", instance, "--seconds", 0.2)
    assert code == 0
    assert output.startswith("0  A")
    assert "lower bound" in output


def test_what_the_budget_ended_before_is_said(tmp_path: Path) -> None:
    models = [
        {"name": name, "stageDevices": on, "microbatches": 32, "forward": forward, "backward": 2 * forward}
        for name, on, forward in (("actor", [*range(8)], 5), ("critic", [*range(7, -1, -1)], 2))
    ]
    file = tmp_path / "instance.json"
    file.write_text(json.dumps({"devices": 8, "pipelines": [{**model, "activation": 1} for model in models]}))
    code, output = invoke("solve", "--instance", file, "--seconds", 0.2)
    assert code == 0
    assert ": --seconds ended before it was proven to be the least" in output


def test_the_same_question_is_searched_once(instance: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = solve(instance, "--cache", cache)
    (entry,) = cache.iterdir()
    assert solve(instance, "--cache", cache) == first  # seconds included: it was read, not searched
    entry.write_text(entry.read_text()[:100])
    assert solve(instance, "--cache", cache)["makespan"] == first["makespan"]  # a torn entry is a miss
    entry.write_text("[" * 100_000)
    assert solve(instance, "--cache", cache)["makespan"] == first["makespan"]  # so is one that is nested too deep
    solve(instance, "--cache", cache, "--seed", 1)
    assert len(list(cache.iterdir())) == 2


def test_compare_names_everything(instance: Path) -> None:
    code, output = invoke("compare", "--instance", instance, "--seconds", 0.2)
    assert code == 0
    for name in ("serial-1f1b", "back-to-back-1f1b", "greedy", "fused, split backward", "lower bound"):
        assert name in output


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"devices": 1}, (), "stageDevices[1]: 1"),
        ({"colour": 1}, (), "colour: 1"),
        ({}, ("--memory-cap", 1.2), "memoryCap: 1.2"),
        ({}, ("--seconds", 0), "seconds: 0"),
        ({}, ("--picture", "x.gif"), "x.gif"),
    ],
)
def test_errors_exit_with_2_and_name_the_field(
    instance: Path, change: dict[str, Any], more: tuple[object, ...], message: str
) -> None:
    instance.write_text(json.dumps({**INSTANCE, **change}))
    code, output = invoke("solve", "--instance", instance, "--seconds", 0.2, *more)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
