"""For any file content, `rlhf validate` and admission answer with problems, and never with another exception."""

import copy
import json
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.manifests.manifest_cases import EXAMPLES

from rlhf_api.manifest import ManifestError, Problem
from rlhf_cli.load_job import load_documents
from rlhf_operator.reconcile.parsed_job import parse_job

BASE: dict[str, Any] = json.loads(json.dumps(yaml.safe_load((EXAMPLES / "ppo.yaml").read_text())))
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a manifest."""
    result = [path] if path else []
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in members:
        result += places(child, (*path, name))
    return result


def problems_of(text: str) -> list[Problem]:
    """Return the problems that `rlhf validate` reports for a text."""
    try:
        return [problem for document in load_documents(text) for problem in document.problems]
    except ManifestError as error:
        return error.problems


PLACES = places(BASE)


def with_value(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(BASE)
    node: Any = data
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return data


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PLACES), ANY_JSON)
@example(("metadata",), [])
@example(("metadata", "name"), 7)
@example(("spec",), "text")
@example(("spec", "checkpoints", "path"), "\x00")
@example(("spec", "checkpoints", "path"), "//")
def test_any_value_in_any_place_is_judged_by_both(path: tuple[Any, ...], value: Any) -> None:
    data = with_value(path, value)
    assert all(str(item) for item in problems_of(json.dumps(data)))
    if isinstance(data["metadata"], dict):
        stored = data | {"apiVersion": BASE["apiVersion"], "kind": BASE["kind"]}
        admission = parse_job(stored)
        assert admission.planned or admission.problem


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abc:-{}[]&*!|>\"'#%@ \n\t0123~<", max_size=60))
def test_any_text_is_load_documents(text: str) -> None:
    assert all(str(item) for item in problems_of(text))
