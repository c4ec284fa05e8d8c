"""Every rule, enum value and default of the generated definition has an accepted row and a rejected row.

The integration tests send the same rows to a real API server; these tests check the models and count the rows.
"""

import copy
from functools import cache
from typing import Any

import pytest
from tests.support.manifests import definition_rows as rows
from tests.support.manifests.manifest_cases import Pair, rule_pairs

from rlhf_api.job import RLHFJob
from rlhf_api.job.status import RLHFJobStatus
from rlhf_api.manifest import ManifestError, checked_job, dump, forbidden_changes
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.table import IMMUTABLE_MESSAGE, LAYOUT, LAYOUT_MESSAGE, RULES
from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_api.yaml_document import Document, read_document

PAIRS = rule_pairs()
NOT_AVAILABLE = "not available in this version"


def read(data: dict[str, Any]) -> RLHFJob:
    """Return the checked job of a manifest's data."""
    return checked_job(Document(copy.deepcopy(data)), "")


@cache
def parsed(text: str) -> dict[str, Any]:
    """Return the data of a manifest; callers copy it before they change it."""
    return dict(read_document(text).data)


@cache
def broken(text: str) -> tuple[Rule, ...]:
    """Return the rules that a manifest breaks."""
    values = Values(with_defaults(parsed(text), job_schema()))
    return tuple(rule for rule in RULES if rule.broken(values))


def refused(data: dict[str, Any]) -> list[str]:
    """Return the fields that the models reject, except those that only this version lacks."""
    try:
        read(data)
    except ManifestError as error:
        return [problem.field for problem in error.problems if NOT_AVAILABLE not in problem.message]
    return []


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_rule_has_two_sides(pair: Pair) -> None:
    assert pair.holds != pair.breaks
    assert not broken(pair.holds)
    assert broken(pair.breaks)
    assert refused(parsed(pair.holds)) == []


def test_every_rule_of_the_definition_has_a_pair() -> None:
    covered = {rule.cel for pair in PAIRS for rule in broken(pair.breaks)}
    assert {rule["rule"] for _, rule in rows.RULES} == covered


def test_every_field_that_is_fixed_in_a_live_job_has_another_value() -> None:
    fixed = {field: LAYOUT_MESSAGE if field in LAYOUT else IMMUTABLE_MESSAGE for field in rows.FIXED}
    assert fixed == rows.TRANSITIONS
    before = read(rows.whole(""))
    for field, (put, drop) in rows.FIXED.items():
        data = rows.whole("")
        for path, value in put.items():
            rows.placed(data, path, value)
        for path in drop:
            del data["spec"][path.removeprefix("spec.")]
        assert any(
            forbidden_change.field.startswith(field) for forbidden_change in forbidden_changes(before, read(data))
        ), field


def test_a_default_may_be_changed_in_a_live_job() -> None:
    before = read(rows.whole(""))
    assert len(rows.others()) > 20
    for field, value in rows.others():
        data, _ = rows.with_value(field, value)
        assert forbidden_changes(before, read(data)) == [], field.path


def test_every_enum_value_is_taken_and_a_stranger_is_not() -> None:
    assert len(rows.ENUMS) > 20
    for field in rows.ENUMS:
        if field.in_status:
            continue  # only the operator writes it
        for value in field.node["enum"]:
            data, _ = rows.with_value(field, value)
            assert refused(data) == [], (field.path, value)
        data, where = rows.with_value(field, "Nonesuch")
        assert where in refused(data), field.path


def test_every_default_is_filled_in_and_of_no_other_type() -> None:
    stored = [dump(read(data)) for data in rows.bare()]
    for status in (rows.STATUS, {}):
        parsed = RLHFJobStatus.model_validate(status)
        stored.append({"status": parsed.model_dump(mode="json", by_alias=True, exclude_none=True)})
    for field in rows.DEFAULTS:
        assert rows.filled_in(field, stored), field.path
        data, where = rows.with_value(field, rows.WRONG[field.node["type"]])
        if not field.in_status:
            assert where in refused(data), field.path
