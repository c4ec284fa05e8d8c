"""Verdicts of `rlhf validate` on more than a hundred manifests.

tests/integration/contract/test_verdicts_agree.py sends the same manifests to the API server and the operator.
"""

import pytest
from tests.support.manifests.manifest_cases import Verdict, verdicts

from rlhf_api.problems import Severity
from rlhf_cli.load_job import load_documents

TABLE = verdicts()
FEWEST = 100


def test_there_are_many_of_each() -> None:
    assert len(TABLE) >= FEWEST
    count = {kind: sum(item.verdict == kind for item in TABLE) for kind in ("valid", "warning", "invalid")}
    assert count["valid"] >= 30
    assert count["warning"] >= 5
    assert sum(count.values()) == len(TABLE)
    assert len({item.name for item in TABLE}) == len(TABLE)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_verdict_and_its_field(case: Verdict) -> None:
    problems = [problem for document in load_documents(case.text) for problem in document.problems]
    errors = [problem for problem in problems if problem.severity is not Severity.WARNING]
    result = "invalid" if errors else "warning" if problems else "valid"
    assert result == case.verdict, [str(problem) for problem in problems]
    if problems:
        assert any(problem.field.startswith(case.field) for problem in problems), [str(problem) for problem in problems]
        assert all(problem.message and len(str(problem)) < 1000 for problem in problems)
