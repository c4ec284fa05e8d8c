"""The page of a run: reading and serving a folder with any file contents."""

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.jobs.recorded_run import HOSTILE, add_iterations, finish_run, write_run

from rlhf_common.names import Env, ExitCode
from rlhf_coordinator.run_page import run_reader
from rlhf_coordinator.run_page.document import embedded, page, plain_json, policy
from rlhf_coordinator.run_page.followed_file import FilePlace, read_piece
from rlhf_coordinator.run_page.run_lines import histories_of, iteration_of, timeline_event
from rlhf_coordinator.run_page.run_reader import RunReader
from rlhf_coordinator.run_page.server import RunPageServer


def asked(server: RunPageServer, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of the answer to one request for this path."""
    at = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", at.port or 0, timeout=60)
    connection.request("GET", path, headers={"Host": host or at.netloc})
    answer = connection.getresponse()
    found = answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def test_a_run_is_given_whole_and_then_only_what_is_new(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=2)
    reader = RunReader(tmp_path)
    first = reader.delta()
    assert [row["iteration"] for row in first["iterations"]] == [0, 1]
    assert [row["iteration"] for row in first["histories"]] == [0, 1]
    assert [table["iteration"] for table in first["tables"]] == [0, 1]
    assert {worker for worker, *_ in first["spans"]} >= {"coordinator", "generation-2", "inference-0", "training-1"}
    assert first["losses"]["headline"].startswith("iteration 1: 10 s each; Generating 6 s (60%)")
    assert first["losses"]["words"], "weights are published in 4 of 10 seconds"
    assert (first["run"]["algorithm"], first["run"]["phase"], first["more"]) == ("ppo", "", False)

    second = reader.delta(first["cursor"])
    assert [second[name] for name in ("spans", "marks", "iterations", "histories")] == [[], [], [], []]
    assert "tables" not in second
    assert "losses" not in second

    add_iterations(tmp_path, [2])
    finish_run(tmp_path)
    third = reader.delta(second["cursor"])
    assert {span[4] for span in third["spans"]} == {2}
    assert 2 in [row["iteration"] for row in third["iterations"]], "its file is written anew, and read anew"
    assert [row["iteration"] for row in third["histories"]] == [2]
    assert third["run"]["phase"] == "Complete"

    add_iterations(tmp_path, [3])
    assert reader.delta(third["cursor"])["run"]["phase"] == "", "it was stopped, and goes on"


def test_small_deltas_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    whole = RunReader(tmp_path).delta()
    monkeypatch.setattr(run_reader, "MAX_BYTES", 4096)
    deltas = list(RunReader(tmp_path).deltas())
    assert len(deltas) > 10
    assert [span for delta in deltas for span in delta["spans"]] == whole["spans"]


def test_of_a_long_timeline_the_newest_part_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=4)
    size = (tmp_path / "timeline.json").stat().st_size
    spans = [span for delta in RunReader(tmp_path, newest_bytes=size // 3).deltas() for span in delta["spans"]]
    assert {span[4] for span in spans} <= {2, 3}
    assert spans[-1][4] == 3


def test_a_line_is_taken_when_it_is_whole_and_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_piece(path, FilePlace(), 100).lines == ()
    path.write_bytes(b"one\ntw")
    piece = read_piece(path, FilePlace(), 100)
    assert (piece.lines, piece.more) == ((b"one",), True)
    path.write_bytes(b"one\ntwo\n")
    piece = read_piece(path, piece.place, 100)
    assert (piece.lines, piece.more, piece.anew) == ((b"two",), False, False)
    path.write_bytes(b"x\n")
    shorter = read_piece(path, piece.place, 100)
    assert (shorter.lines, shorter.anew) == ((b"x",), True)
    path.write_bytes(b"y" * 1000)
    assert read_piece(path, FilePlace(), 100).place.offset == 100, "a line that nobody writes is passed over"


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.text() | st.sampled_from(["ts", "dur", "name", "args", "ph", "pid", "tid", "iteration", "time_ns"]),
                inner,
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_a_line_holds_is_no_error(line: bytes) -> None:
    for read in (timeline_event, iteration_of, histories_of):
        found = read(line)
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("cursor", ["x", "[]", "{}", '{"timeline": [-1, 0]}', '{"timeline": "ab"}', "[" * 5000])
def test_a_cursor_that_is_none_begins_anew(tmp_path: Path, cursor: str) -> None:
    write_run(tmp_path, iterations=1)
    assert RunReader(tmp_path).delta(cursor)["spans"] == RunReader(tmp_path).delta()["spans"]


def test_nothing_of_a_run_can_end_the_element_it_lies_in(tmp_path: Path) -> None:
    write_run(tmp_path)
    deltas = list(RunReader(tmp_path).deltas())
    assert HOSTILE in json.dumps(deltas)
    written = page(embedded(deltas)).decode()
    assert "onerror=alert(1)>" not in written
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == json.loads(plain_json(deltas))
    assert "'unsafe" not in policy(live=True)
    assert "connect-src 'none'" in written


def test_the_page_is_served_to_who_has_its_address_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run", iterations=1)
    before = {path: stat.S_IFMT(path.stat().st_mode) for path in tmp_path.rglob("*")}
    with RunPageServer(tmp_path / "run") as server:
        root = urlsplit(server.url).path
        status, body, headers = asked(server, root)
        assert (status, body) == (200, page())
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert headers["x-content-type-options"] == "nosniff"
        status, body, _ = asked(server, root + "delta")
        cursor = json.loads(body)["cursor"]
        assert status == 200
        assert json.loads(asked(server, f"{root}delta?cursor={quote(cursor)}")[1])["spans"] == []
        for path in (
            "/",
            "/delta",
            "/" + "x" * len(root),
            f"{root}job.json",
            f"{root}../job.json",
            "/../../etc/passwd",
        ):
            assert asked(server, path)[0] == 404, path
        for host in ("evil.example", "evil.example:80", f"evil.example:{urlsplit(server.url).port}", "127.0.0.1"):
            assert asked(server, root, host)[0] == 403, host
    assert before == {path: stat.S_IFMT(path.stat().st_mode) for path in tmp_path.rglob("*")}, "it was only read"


@pytest.mark.full
def test_started_beside_a_coordinator_it_says_its_address_or_what_is_wrong(tmp_path: Path) -> None:
    write_run(tmp_path)

    def started(*options: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_coordinator.run_page", *options],
            env={name: value for name, value in os.environ.items() if name != Env.RUN_DIR} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for process, words, code in (
            (started(), "RLHF_RUN_DIR is not set", ExitCode.USAGE),
            (started("--port=0", RLHF_RUN_DIR=str(tmp_path)), "--port 0: must be 1 to 65535", ExitCode.USAGE),
            (started(f"--port={port}", RLHF_RUN_DIR=str(tmp_path)), "give another", ExitCode.ADDRESS_IN_USE),
        ):
            assert words in process.communicate(timeout=300)[0]
            assert process.returncode == code
    serving = started(f"--port={port}", RLHF_RUN_DIR=str(tmp_path))
    assert serving.stdout is not None
    address = serving.stdout.readline().split(" is shown at ")[1].split()[0]
    with urllib.request.urlopen(address, timeout=300) as answer:
        assert answer.status == 200
    serving.send_signal(signal.SIGHUP)
    serving.communicate(timeout=300)
    assert serving.returncode == 0, "the end of its terminal is a clean end"


def test_who_asks_is_noticed(tmp_path: Path) -> None:
    write_run(tmp_path)
    with RunPageServer(tmp_path) as server:
        server._asked -= 1000
        assert server.idle_seconds >= 1000
        assert asked(server, urlsplit(server.url).path)[0] == 200
        assert server.idle_seconds < 1000
