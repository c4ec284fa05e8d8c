"""Every invalid manifest of the table is rejected with the field, the value, the remedy and, for files, the line."""

from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.manifests.manifest_cases import Case, invalid_cases

from rlhf_api.manifest import ManifestError, load, parse

CASES = invalid_cases()


def refused(text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_names_field_value_and_remedy(case: Case) -> None:
    result = {(problem.field, problem.message): problem for problem in refused(case.text).problems}
    for wanted in case.problems:
        matching = [
            problem
            for problem in result.values()
            if problem.field == wanted["field"] and wanted["says"] in problem.message
        ]
        assert matching, f"{wanted} is not among {list(map(str, result.values()))}"
        if "value" in wanted:
            assert matching[0].value == wanted["value"]
            assert type(matching[0].value) is type(wanted["value"])
    assert len(result) == len(case.problems), list(map(str, result.values()))


def test_table_is_as_long_as_promised() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


def test_all_problems_come_at_once_with_their_lines() -> None:
    error = refused(
        """apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: job}
spec:
  algorithm: {ppo: {}}
  models:
    actor: {}
    reward: {function: {file: reward.py}}
  prompts: {path: prompts.jsonl}
  rollout:
    batchSize: 100
    batch_size: 100
  fusion: {interStage: {mode: Off}}
  training: {backend: jax}
"""
    )
    assert [(problem.field, problem.line) for problem in error.problems] == [
        ("spec.models.actor.path", 7),
        ("spec.rollout.batchSize", 11),
        ("spec.rollout.batch_size", 12),
        ("spec.fusion.interStage.mode", 13),
        ("spec.training.backend", 14),
    ]


def test_rules_over_a_wrong_field_stay_silent() -> None:
    error = refused(CASES_BY_NAME["number in quotes"].text)
    assert [problem.field for problem in error.problems] == ["spec.rollout.batchSize"]


CASES_BY_NAME = {case.name: case for case in CASES}


def test_message_reads_as_one_line_a_problem() -> None:
    error = refused(CASES_BY_NAME["mini-batches that do not fill the batch"].text)
    _, line = str(error).splitlines()
    assert line.startswith(
        "- spec.rollout.batchSize = 100: must be a multiple of spec.algorithm.ppo.miniBatchSize (64): use 128"
    )


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"missing\.yaml: 1 problem\n.*No such file"):
        load(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match=r"cannot be read"):
        load(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x: " + "[" * 1200, "nested too deeply"),
        ("x: " + "y" * 1_100_000, "larger than"),
        (
            "a: &a [1]\n"
            + "".join(f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in pairwise("abcdefgh")),
            "more than 100000 fields",
        ),
        ("a: &a [*a]", "nested too deeply"),
        ("x: \x00", "not valid YAML"),
    ],
)
def test_hostile_text_is_refused_in_words(text: str, says: str) -> None:
    assert says in str(refused(text))
