"""Three-way merges: only what changed is changed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_operator.reconcile.revisions.three_way_merge import carried, prune_unknown

leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
names = st.sampled_from(["name", "mountPath", "x", "y"])
data = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)


def entries(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of nested mappings by path; a list is a leaf."""
    if not isinstance(value, dict):
        return {path: value}
    return {place: leaf for key, each in value.items() for place, leaf in entries(each, (*path, key)).items()}


trees = st.recursive(
    st.integers(0, 2), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=9
).filter(lambda value: isinstance(value, dict))


@given(data, data)
def test_who_changes_nothing_changes_nothing(base: Any, then: Any) -> None:
    assert carried(base, then, then) == base


@given(data, data)
def test_what_was_pinned_by_this_version_is_what_it_says_now(then: Any, now: Any) -> None:
    assert carried(then, then, now) == now


@given(trees, trees, trees)
def test_an_edit_arrives_and_everything_else_stays(base: Any, then: Any, now: Any) -> None:
    merged = entries(carried(base, then, now))
    before, after, base_entries = entries(then), entries(now), entries(base)
    for path, value in after.items():
        if before.get(path) != value:
            assert merged[path] == value, "what the user said"
    touched = {key for key in (*then, *now) if then.get(key, ...) != now.get(key, ...)}
    for path, value in base_entries.items():
        if path and path[0] not in touched:
            assert merged[path] == value, "what the user did not touch"


def test_items_of_lists_are_told_apart_by_their_keys() -> None:
    base = [{"name": "A", "value": "1"}, {"name": "OLD", "value": "x"}]
    then = [{"name": "A", "value": "2"}, {"name": "B", "value": "1"}]
    now = [{"name": "A", "value": "2"}, {"name": "B", "value": "1"}, {"name": "MINE", "value": "3"}]
    assert carried(base, then, now) == [base[0], {"name": "MINE", "value": "3"}, base[1]]
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]
    assert carried(mounts, mounts, mounts[1:]) == mounts[1:]
    assert carried([1, 2], [1], [3]) == [3], "a list without keys is the user's as a whole"


FREE = {"x-kubernetes-preserve-unknown-fields": True}
SCHEMA = {"properties": {"a": {"properties": {"b": {}, "new": {}}}, "free": FREE}}


def test_fields_that_a_version_does_not_know_are_left_out_and_keys_of_the_user_are_not() -> None:
    document = {"a": {"b": 1, "new": 2}, "free": {"new": 3}, "gone": None}
    result = prune_unknown(document, {"a": {"b": 0}, "free": {}}, SCHEMA)
    assert result == ({"a": {"b": 1}, "free": {"new": 3}}, ["a.new", "gone"])
    assert prune_unknown({"a": {"new": 1}}, {"a": None}, SCHEMA) == ({"a": {"new": 1}}, []), "it may or may not know"
