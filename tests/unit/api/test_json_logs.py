"""One schema of log lines for operator, coordinator and workers."""

import json
import logging
import sys

from rlhf_api.json_logs import JsonLogFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "rlhf", "levelname": "WARNING", "msg": message, "created": 1.5})
    made.__dict__.update(extra)
    return made


def test_a_line_says_when_how_bad_who_and_what() -> None:
    line = json.loads(JsonLogFormatter("training-0").format(record("läuft")))
    expected = {"time": "1970-01-01T00:00:01.500+00:00", "level": "WARNING", "worker": "training-0", "message": "läuft"}
    assert line == expected
    assert json.loads(JsonLogFormatter().format(record("x")))["logger"] == "rlhf"


def test_extras_are_shown_where_a_record_has_them_and_others_never() -> None:
    formatter = JsonLogFormatter("coordinator", extras=("report",))
    assert json.loads(formatter.format(record("x", report={"iteration": 3}, job="a/b")))["report"] == {"iteration": 3}
    assert "report" not in json.loads(formatter.format(record("x")))
    assert "job" not in json.loads(formatter.format(record("x", job="a/b")))


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        text = JsonLogFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in text
    assert json.loads(text)["traceback"].endswith("ValueError: two\nlines")
