"""The coordinator's last log line names the reason and the field once each."""

import logging

import pytest

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.__main__ import failed


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            "spec.deterministic: true cannot be guaranteed",
            "NotReproducible: spec.deterministic: true cannot be guaranteed",
        ),
        ("true cannot be guaranteed", "NotReproducible: spec.deterministic: true cannot be guaranteed"),
    ],
)
def test_a_field_is_named_once(message: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        code = failed(pb.Failure(reason="NotReproducible", field="spec.deterministic", message=message, exit_code=3))
    own = [record.getMessage() for record in caplog.records if record.name == "coordinator"]
    assert (code, own) == (3, [says])
