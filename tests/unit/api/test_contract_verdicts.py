"""What `rlhf validate` says of more than a hundred manifests; the API server and the operator are asked the same by
tests/integration/contract/test_verdicts_agree.py.
"""

import pytest
from tests.support.manifest_cases import Verdict, verdicts

from rlhf_api.problems import Severity
from rlhf_cli.load_job import load_documents

TABLE = verdicts()
FEWEST = 100


def test_there_are_many_of_each() -> None:
    assert len(TABLE) >= FEWEST
    count = {kind: sum(each.verdict == kind for each in TABLE) for kind in ("valid", "warning", "invalid")}
    assert count["valid"] >= 30
    assert count["warning"] >= 5
    assert sum(count.values()) == len(TABLE)
    assert len({each.name for each in TABLE}) == len(TABLE)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_verdict_and_its_field(case: Verdict) -> None:
    problems = [problem for each in load_documents(case.text) for problem in each.problems]
    errors = [each for each in problems if each.severity is not Severity.WARNING]
    found = "invalid" if errors else "warning" if problems else "valid"
    assert found == case.verdict, [str(each) for each in problems]
    if problems:
        assert any(each.field.startswith(case.field) for each in problems), [str(each) for each in problems]
        assert all(each.message and len(str(each)) < 1000 for each in problems)
