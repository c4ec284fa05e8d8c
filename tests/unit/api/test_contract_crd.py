"""The generated definition is up to date, structural and small, with descriptions and bounds where required."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf_api import crd, field_reference
from rlhf_api.algorithms import ALGORITHMS
from rlhf_api.job import RLHFJob
from rlhf_api.job.algorithm import Algorithm
from rlhf_api.job.status import RLHFJobStatus
from rlhf_api.rules.table import IMMUTABLE, MAX_NAME, RULES
from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_api.structural_schema import fields, model_in, schema_at, with_defaults
from rlhf_common.conditions import ConditionType

STRUCTURAL = {
    "description", "type", "format", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "default", "required", "properties", "items", "example",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}  # fmt: skip


def nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None:
            yield from models(inner)


SCHEMA = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NODES = dict(nodes(SCHEMA, ""))


def test_checked_in_files_are_fresh() -> None:
    assert crd.PATH.read_text() == crd.text(), "stale: run python -m rlhf_api.crd"
    assert field_reference.PATH.read_text() == field_reference.text(), "stale: run python -m rlhf_api.field_reference"


def test_small_enough_for_client_side_apply() -> None:
    """`kubectl apply` stores the object as compact JSON in an annotation; all together may have 262,144 bytes."""
    assert len(json.dumps(crd.definition(), separators=(",", ":"))) < 230_000


def test_structural() -> None:
    for path, node in NODES.items():
        assert set(node) <= STRUCTURAL, path
        assert "type" in node, path
        assert node.get("default", 0) is not None, path


def test_what_cel_reads_is_bounded() -> None:
    for path, node in NODES.items():
        if node["type"] == "string" and path.startswith(".spec") and "enum" not in node:
            assert "maxLength" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path


def test_rules_see_their_nodes_default_in_full() -> None:
    ruled = {rule.node for rule in RULES if rule.node}
    checked = [(path, node) for path, node in NODES.items() if path[1:] in ruled and "default" in node]
    assert checked
    for path, node in checked:
        assert node["default"] == with_defaults({}, node), f"{path}: the API server would refuse the definition"


def test_every_field_and_model_has_a_docstring() -> None:
    for root in (RLHFJob, RLHFJobStatus):
        for model in models(root):
            assert model.__doc__, model
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name} has no docstring"
                assert field.description.endswith((".", ")")), (
                    f"{model.__name__}.{name}: end the docstring with a full stop"
                )


def test_schema_carries_descriptions_and_defaults() -> None:
    for path, node in fields(SCHEMA["properties"]["spec"], "spec"):
        assert node["description"], path
    clip = NODES[".spec.algorithm.ppo.clipRange"]
    assert {key: clip[key] for key in clip if key != "description"} == {
        "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1, "exclusiveMaximum": True,
        "default": 0.2,
    }  # fmt: skip
    assert NODES[".spec.rollout"]["default"] == {}
    assert NODES[".spec.seed"]["format"] == "int64"
    assert "default" not in NODES[".spec.models.critic"]
    for free in (".spec.generation.template", ".spec.training.template", ".spec.generation.engineArgs"):
        assert NODES[free]["x-kubernetes-preserve-unknown-fields"] is True


def test_conditions_and_groups_are_list_maps() -> None:
    assert NODES[".status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert NODES[".status.groups"]["x-kubernetes-list-map-keys"] == ["name"]
    assert len(ConditionType) <= NODES[".status.conditions"]["maxItems"]


def test_columns_and_scale_point_at_fields_that_exist() -> None:
    version = crd.definition()["spec"]["versions"][0]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += list(version["subresources"]["scale"].values())
    for path in paths:
        plain = path.replace('[?(@.type=="Running")]', "[]")
        assert plain in NODES or plain.startswith(".metadata."), path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.field}: {rule.message}")
def test_rules_blame_fields_that_exist_at_or_below_their_node(rule: Any) -> None:
    assert schema_at(rule.field) is not None
    assert rule.field.startswith(rule.node)
    assert len(rule.message) < 2048


def test_immutable_and_unavailable_name_fields_that_exist() -> None:
    for path in IMMUTABLE:
        assert schema_at(path), path
    for lack in UNAVAILABLE:
        node = schema_at(lack.field)
        assert node is not None
        assert lack.value in node["enum"] if "enum" in node else re.search(node["pattern"], lack.value)


def test_every_algorithm_of_the_manifest_has_a_graph() -> None:
    assert set(Algorithm.model_fields) == set(ALGORITHMS)


def test_longest_host_name_fits_a_dns_label() -> None:
    assert len("x" * MAX_NAME + "-generation-4095") == 63
