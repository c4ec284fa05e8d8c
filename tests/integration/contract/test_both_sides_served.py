"""Every rule, enum value and default of the generated definition on a real API server: what it accepts and refuses.

`definition_rows` of the unit tests reads the rows from the definition and checks that none is missing.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.support.manifests import definition_rows as rows
from tests.support.manifests.manifest_cases import rule_pairs
from tests.support.manifests.served_definition import Causes, ServedDefinition

from rlhf_api.manifest import dump, parse
from rlhf_api.rules.rule import Values
from rlhf_api.rules.table import LAYOUT, LAYOUT_MESSAGE, RULES
from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_api.yaml_document import read_document

LEAVES_NO_OTHER = {"spec.suspend", "spec.iterations", "spec.checkpoints.every"}
"""Some fields that must be changeable in a live job, so that the list cannot become empty."""


@pytest.fixture(scope="module")
def live(served: ServedDefinition) -> Iterator[str]:
    """Yield a stored job in which every fixed field has a value."""
    name = served.store(rows.whole("") | {"metadata": {"name": "live"}})
    yield name
    served.remove(name)


def says(causes: Causes, field: str, words: str) -> bool:
    """Return whether the API server blames `field` with this message."""
    return any(where == field and words in message for where, message in causes)


def test_every_rule_takes_one_side_and_refuses_the_other(served: ServedDefinition) -> None:
    for pair in rule_pairs():
        _, causes = served.created(read_document(pair.holds).data)
        assert causes == [], pair.name
        _, causes = served.created(read_document(pair.breaks).data)
        values = Values(with_defaults(read_document(pair.breaks).data, job_schema()))
        result = [(rule.field, words.partition(", got")[0]) for rule in RULES if (words := rule.broken(values))]
        assert result
        for field, words in result:
            assert says(causes, field, words), (pair.name, field, words, causes)
        assert len(causes) == len(result), (pair.name, causes)


def test_what_is_fixed_in_a_live_job_stays_and_the_rest_may_change(served: ServedDefinition, live: str) -> None:
    for field, (put, drop) in rows.FIXED.items():
        data = rows.whole("")
        for path, value in put.items():
            rows.placed(data, path, value)
        for path in drop:
            del data["spec"][path.removeprefix("spec.")]
        causes = served.replaced(live, data)
        assert says(causes, field, rows.TRANSITIONS[field]), (field, causes)
    changed = set()
    for other, value in rows.others():
        data, _ = rows.with_value(other, value)
        assert served.replaced(live, data) == [], (other.path, value)
        changed.add(other.path)
    assert changed >= LEAVES_NO_OTHER


def test_a_suspended_job_takes_another_layout_of_ranks_until_it_is_resumed(served: ServedDefinition) -> None:
    def job(settings: dict[str, Any], *, suspend: bool) -> dict[str, Any]:
        data = rows.whole("")
        rows.placed(data, "spec.training.lora", None)  # not every layout has adapters
        for path, value in settings.items():
            rows.placed(data, path, value)
        data["spec"]["suspend"] = suspend
        return data

    for field in LAYOUT:
        changed = rows.FIXED[field][0]
        beside = {path: value for path, value in changed.items() if not f"{path}.".startswith(f"{field}.")}
        name = served.store(job(beside, suspend=True) | {"metadata": {"name": "suspended"}})
        assert served.replaced(name, job(changed, suspend=True)) == [], field
        assert says(served.replaced(name, job(changed, suspend=False)), field, LAYOUT_MESSAGE), field
        served.remove(name)


def test_every_enum_takes_its_values_and_no_other(served: ServedDefinition, live: str) -> None:
    for field in rows.ENUMS:
        for value in field.node["enum"]:
            data, _ = rows.with_value(field, value)
            _, causes = served.status(live, data["status"]) if field.in_status else served.created(data)
            assert causes == [], (field.path, value)
        data, where = rows.with_value(field, "Nonesuch")
        _, causes = served.status(live, data["status"]) if field.in_status else served.created(data)
        assert says(causes, where, 'Unsupported value: "Nonesuch"'), (field.path, causes)


def test_every_default_is_filled_in_as_the_models_do_and_takes_no_other_type(
    served: ServedDefinition, live: str
) -> None:
    stored = []
    for data in rows.bare():
        result, causes = served.created(data)
        assert causes == []
        assert result["spec"] == dump(parse(yaml.safe_dump(data)))["spec"]
        # The defaults may also be written.
        assert served.created({**result, "metadata": data["metadata"]})[1] == []
        stored.append(result)
    for status in (rows.STATUS, {}):
        result, causes = served.status(live, status)
        assert causes == []
        stored.append({"status": result["status"]})
    for field in rows.DEFAULTS:
        assert rows.filled_in(field, stored), field.path
        data, where = rows.with_value(field, rows.WRONG[field.node["type"]])
        _, causes = served.status(live, data["status"]) if field.in_status else served.created(data)
        assert says(causes, where, "must be of type"), (field.path, causes)
