"""The tiers of tests: the cases and examples of the quick tier, and the tests that a change selects."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.support.full_tier import quick_examples, try_fewer_examples, unmark_quick_cases

from changed_tests import importing_tests

ROOT = Path(__file__).parents[2]


def case(request: pytest.FixtureRequest, name: str, **arguments: Any) -> pytest.Item:
    item = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
    item.add_marker(pytest.mark.full(**arguments))
    return item


def test_the_first_cases_of_a_test_are_in_the_quick_tier(request: pytest.FixtureRequest) -> None:
    items = [case(request, name, quick=2) for name in ("test_a[1]", "test_a[2]", "test_a[3]", "test_b[1]")]
    items.append(case(request, "test_c"))
    unmark_quick_cases(items)
    assert [item.name for item in items if item.get_closest_marker("full")] == ["test_a[3]", "test_c"]


def test_a_property_test_tries_a_quarter_of_its_examples(request: pytest.FixtureRequest) -> None:
    seen: list[int] = []

    @settings(max_examples=200)
    @given(st.integers())
    def collect(number: int) -> None:
        seen.append(number)

    cases = [pytest.Function.from_parent(request.node.parent, name=name, callobj=collect) for name in ("[1]", "[2]")]
    try_fewer_examples([case(request, "test_a"), *cases])
    collect()
    assert len(seen) == 50, "two cases of one function lower its number once"
    assert [quick_examples(number) for number in (4, 30, 60, 1500)] == [4, 10, 15, 375]


def test_a_state_machine_tries_a_quarter_of_its_examples() -> None:
    class StepMachine(RuleBasedStateMachine):
        @rule()
        def step(self) -> None:
            """Do nothing."""

    StepMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=7)
    item: Any = SimpleNamespace(obj=StepMachine.TestCase.runTest, cls=StepMachine.TestCase)
    try_fewer_examples([item])
    assert StepMachine.TestCase.settings.max_examples == 20
    assert StepMachine.TestCase.settings.stateful_step_count == 7


def test_a_change_selects_the_tests_that_import_it_however_indirectly() -> None:
    selected = importing_tests({"rlhf_coordinator.storage.mixture"})
    assert "tests/unit/coordinator/storage/test_mixture.py" in selected
    assert "tests/integration/coordinator/test_coordinator.py" in selected
    assert not any(path.startswith("tests/unit/operator/") for path in selected)
    assert all((ROOT / path).is_file() for path in selected)
    assert importing_tests({"nothing.of.the.project"}) == []
