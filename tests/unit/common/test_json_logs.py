"""Operator, coordinator and workers have the same schema of log lines."""

import json
import logging
import subprocess
import sys
from pathlib import Path

from rlhf_common.json_logs import JsonLogFormatter, LogContext, job_key


def record(message: str, **extra: object) -> logging.LogRecord:
    entry = logging.makeLogRecord({"name": "rlhf", "levelname": "WARNING", "msg": message, "created": 1.5})
    entry.__dict__.update(extra)
    return entry


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


def test_what_the_process_knows_is_in_every_line_and_what_it_does_not_know_in_none() -> None:
    context = LogContext()
    formatter = JsonLogFormatter("generation-0", extras=("job",), context=context)
    assert set(json.loads(formatter.format(record("x")))) == {"time", "level", "worker", "message"}
    context.present = lambda: {"job": "team/tiny", "iteration": 0, "trace_id": ""}
    line = json.loads(formatter.format(record("x")))
    assert (line["job"], line["iteration"]) == ("team/tiny", 0)
    assert "trace_id" not in line
    assert json.loads(formatter.format(record("x", job="a/b")))["job"] == "a/b", "what a line itself says wins"


def test_what_is_no_json_is_written_as_text() -> None:
    formatter = JsonLogFormatter("coordinator", extras=("report",))
    assert json.loads(formatter.format(record("x", report={"path": Path("/run")})))["report"] == {"path": "/run"}


PRINTS = """
import logging, sys, threading, warnings
from rlhf_common.json_logs import JsonLogFormatter, log_what_is_printed
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(JsonLogFormatter("training-0"))
logging.basicConfig(handlers=[handler])
log_what_is_printed()
warnings.warn("an old option", UserWarning)
thread = threading.Thread(target=lambda: 1 / 0, name="writer")
thread.start()
thread.join()
raise RuntimeError("two\\nlines")
"""


def test_what_python_prints_itself_is_lines_too() -> None:
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=120)
    warned, died, last = (json.loads(line) for line in ended.stderr.splitlines())
    assert ended.returncode == 1
    assert "an old option" in warned["message"]
    assert died["message"].startswith("thread writer ended by ZeroDivisionError")
    assert last["message"] == "ended by RuntimeError: two\nlines"
    assert last["traceback"].endswith("RuntimeError: two\nlines")


def test_a_job_without_a_namespace_is_in_the_default_one() -> None:
    assert job_key({"name": "tiny"}) == "default/tiny"
    assert job_key({"name": "tiny", "namespace": "team"}) == "team/tiny"
