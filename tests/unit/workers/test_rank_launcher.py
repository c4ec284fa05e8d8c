"""The launcher of a pod of several ranks, with real processes as workers: which ones end, how, and leftovers."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.support.jobs.processes_left import alive, process_state, until

from rlhf_workers import rank_launcher
from rlhf_workers.rank_launcher import CHUNK, LaunchedRank
from rlhf_workers.ranks.endpoint import RanksUnwellError, ailment_of, answers, merged
from rlhf_workers.ranks.ends import RankEnd, pod_end
from rlhf_workers.ranks.environments import rank_environments
from rlhf_workers.settings import SettingsError, read_settings

RANK = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

name = f"{os.environ['RLHF_GROUP']}-{os.environ['RLHF_INDEX']}"
folder = Path(os.environ["FOLDER"])
def leave(*_):
    print(json.dumps({"message": f"{name} closes"}), file=sys.stderr, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("STUBBORN") else leave)
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b"# TYPE up gauge\\nup 1\\n")
    def log_message(self, *_): pass
host, port = os.environ["RLHF_METRICS"].split(":")
server = HTTPServer((host, int(port)), Answer)
server.timeout = 0.02
(folder / f"{name}.new").write_text(f"{os.getpid()} {os.environ['RLHF_DEVICE']} {os.environ['RLHF_LISTEN']}")
(folder / f"{name}.new").rename(folder / name)
while True:
    server.handle_request()
    if (order := folder / f"{name}.exit").exists() and order.read_text():  # a file is there before what it says
        print(json.dumps({"message": f"{name} has a reason"}), file=sys.stderr, flush=True)
        os._exit(int(order.read_text()))
"""

PROGRAM = """
import os, sys
import rlhf_workers.rank_launcher as launcher

launcher.COMMAND = ("RANK",)
launcher.LEAVE_SECONDS = float(os.environ.get("LEAVE", "0.5"))
launcher.LET_GO_SECONDS = float(os.environ.get("LET_GO", "60"))
code = launcher.main()
assert "torch" not in sys.modules
sys.stderr.flush()
os._exit(code)
"""
"""The launcher as in a pod, with shorter time-outs and with stand-ins for ranks."""


def variables(ports: list[int], metrics: int = 0) -> dict[str, str]:
    ranks = len(ports)
    return {
        "RLHF_RANKS": str(ranks),
        "RLHF_GROUP": "training",
        "RLHF_INDEX": "1",
        "RLHF_COORDINATOR": "127.0.0.1:1",
        "RLHF_METRICS": f"127.0.0.1:{metrics}" if metrics else "",
        "RLHF_LISTEN": ",".join(f"127.0.0.1:{7000 + rank}" for rank in range(ranks)),
        "RLHF_ADVERTISE": ",".join(f"pod:{7000 + rank}" for rank in range(ranks)),
        "RLHF_DEVICE": ",".join(f"cuda:{rank}" for rank in range(ranks)),
        "RLHF_RENDEZVOUS_PORT": ",".join(str(8000 + rank) for rank in range(ranks)),
        "RLHF_RANK_METRICS": ",".join(f"127.0.0.1:{port}" for port in ports),
    }


class Pod:
    """A launcher and the output of its ranks."""

    def __init__(self, folder: Path, metrics: int, ports: list[int], **more: str) -> None:
        self.folder, self.metrics = folder, metrics
        (folder / "rank.py").write_text(RANK)
        # Only what the ranks are is replaced; all else is the launcher as it runs in a pod.
        program = PROGRAM.replace("RANK", str(folder / "rank.py"))
        environment = {**os.environ, **variables(ports, metrics), "FOLDER": str(folder), **more}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], env=environment, stderr=log, stdout=log, start_new_session=True
            )
        self.names = [f"training-{len(ports) + rank}" for rank in range(len(ports))]
        until(lambda: all((folder / name).exists() for name in self.names) or self.process.poll() is not None)
        self.said = {name: (folder / name).read_text().split() for name in self.names}

    def pid(self, name: str) -> int:
        return int(self.said[name][0])

    def wait_for(self, name: str) -> None:
        """Wait for the end of a rank."""
        until(lambda: not alive(self.pid(name)))

    def ended(self) -> tuple[int, str]:
        """Return exit code and last line, after checking that no rank is left."""
        code = self.process.wait(timeout=30)
        until(lambda: not any(alive(self.pid(name)) for name in self.names))
        return code, (self.log.read_text().splitlines() or [""])[-1]


@contextmanager
def pod(folder: Path, ports: list[int], ranks: int = 3, **more: str) -> Iterator[Pod]:
    launched = Pod(folder, ports[-1], ports[:ranks], **more)
    try:
        yield launched
    finally:
        launched.process.kill()
        launched.process.wait()


@pytest.fixture
def ports() -> list[int]:
    from random import Random

    from rlhf_cli.local.ports import free_ports

    free = free_ports(Random())
    return [next(free) for _ in range(4)]


def test_ranks_have_the_names_devices_and_ports_of_their_place(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports) as launched:
        assert [launched.said[name][1:] for name in ("training-3", "training-4", "training-5")] == [
            ["cuda:0", "127.0.0.1:7000"],
            ["cuda:1", "127.0.0.1:7001"],
            ["cuda:2", "127.0.0.1:7002"],
        ]


def test_one_is_killed_and_all_end_by_its_signal_with_its_name_last(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports, STUBBORN="1") as launched:
        os.kill(launched.pid("training-4"), signal.SIGKILL)
        code, last = launched.ended()
    assert code == 128 + signal.SIGKILL
    assert "training-4 ended with signal 9 (killed, or out of memory), and the ranks of its pod with it" in last


def test_one_fails_and_all_end_by_its_exit_code_with_its_last_words(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports) as launched:
        (tmp_path / "training-5.exit").write_text("21")
        code, last = launched.ended()
    assert code == 21
    assert last.endswith(
        "training-5 ended with exit code 21, and the ranks of its pod with it: training-5 has a reason"
    )


def test_who_follows_another_rank_is_not_the_cause(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports, LEAVE="60") as launched:
        for name, exit_code in (("training-3", "75"), ("training-5", "21"), ("training-4", "75")):
            (tmp_path / f"{name}.exit").write_text(exit_code)
            launched.wait_for(name)
        code, last = launched.ended()
    assert (code, "training-5 ended with exit code 21" in last) == (21, True)


def test_sigterm_is_passed_on_and_ends_well(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports) as launched:
        launched.process.send_signal(signal.SIGTERM)
        code, last = launched.ended()
    assert code == 0
    assert "every rank of this pod was released" in last
    assert all(f"{name} closes" in launched.log.read_text() for name in launched.names)


def test_a_killed_launcher_leaves_none(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports, STUBBORN="1") as launched:
        launched.process.kill()
        assert launched.ended()[0] == -signal.SIGKILL


def test_all_that_are_let_go_end_the_pod_well(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports) as launched:
        for name in launched.names:
            (tmp_path / f"{name}.exit").write_text("0")
        assert launched.ended()[0] == 0


def test_one_that_is_let_go_alone_restarts_the_pod(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports, LET_GO="0.3") as launched:
        (tmp_path / "training-4.exit").write_text("0")
        code, last = launched.ended()
    assert code == 75
    assert "training-4 ended with exit code 75" in last


def fetched(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_one_port_serves_the_metrics_and_the_liveness_of_all(tmp_path: Path, ports: list[int]) -> None:
    with pod(tmp_path, ports) as launched:
        until(lambda: is_served(launched.metrics, "/metrics"))
        assert fetched(launched.metrics, "/livez") == (200, "ok\n")
        up = "".join(f'up{{worker="{name}"}} 1\n' for name in launched.names)
        assert fetched(launched.metrics, "/metrics") == (200, f"# TYPE up gauge\n{up}")
        os.kill(launched.pid("training-4"), signal.SIGSTOP)
        until(lambda: process_state(launched.pid("training-4")) == "T")
        status, text = fetched(launched.metrics, "/livez")
        assert (status, text.startswith("training-4: its endpoint does not answer")) == (503, True)
        assert fetched(launched.metrics, "/metrics")[0] == 503


def is_served(port: int, path: str) -> bool:
    """Return whether the path is there: the launcher opens its endpoint before it has metrics."""
    try:
        return fetched(port, path)[0] == 200
    except OSError:
        return False


def test_environments_are_those_of_pods_of_one_rank() -> None:
    ranks = rank_environments(variables([1, 2]) | {"OTHER": "kept", "RLHF_THREADS": "3"})
    settings = [read_settings(rank.environment) for rank in ranks]
    assert [rank.name for rank in ranks] == [each.worker for each in settings] == ["training-2", "training-3"]
    assert [(each.device, each.listen, each.rendezvous_port) for each in settings] == [
        ("cuda:0", "127.0.0.1:7000", 8000),
        ("cuda:1", "127.0.0.1:7001", 8001),
    ]
    assert [each.metrics for each in settings] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert all(rank.environment["OTHER"] == "kept" and "RLHF_RANKS" not in rank.environment for rank in ranks)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLHF_RANKS", "0"),
        ("RLHF_RANKS", "two"),
        ("RLHF_INDEX", ""),
        ("RLHF_LISTEN", "127.0.0.1:1"),
        ("RLHF_DEVICE", "cpu,"),
        ("RLHF_RANK_METRICS", "a,b"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        rank_environments(variables([1, 2]) | {name: value})


def test_pages_are_one_page_with_each_family_once() -> None:
    first = '# HELP a A.\n# TYPE a counter\na_total{worker="training-0"} 1\n# TYPE b gauge\nb 2\nb{x="y"} 3\n'
    page = merged({"training-0": first, "training-1": first.replace("training-0", "training-1")})
    assert page == (
        '# HELP a A.\n# TYPE a counter\na_total{worker="training-0"} 1\na_total{worker="training-1"} 1\n'
        '# TYPE b gauge\nb{worker="training-0"} 2\nb{worker="training-0",x="y"} 3\n'
        'b{worker="training-1"} 2\nb{worker="training-1",x="y"} 3\n'
    )


def test_a_job_without_metrics_is_answered_as_its_ranks_answer() -> None:
    with pytest.raises(RanksUnwellError, match="training-0: off") as raised:
        answers({"training-0": "a:1"}, "/metrics", lambda *_: (404, "off\n"))
    assert raised.value.status == 404


def test_a_rank_that_answers_no_text_is_an_answer() -> None:
    class Binary(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b"stuck \xff")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Binary) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        assert ailment_of({"training-0": address})() == "training-0: stuck \N{REPLACEMENT CHARACTER}"
        thread.join()


def test_lines_stay_whole_however_many_wait(capfd: pytest.CaptureFixture[str]) -> None:
    output, written = os.pipe()
    rank = LaunchedRank("training-0", 0, output)
    line = json.dumps({"message": "m" * 900}).encode() + b"\n"
    unfinished = json.dumps({"message": "the last"}).encode() + b"\n"
    data = line * (2 * CHUNK // len(line)) + unfinished
    parts = [data[:500], *(data[start : start + CHUNK] for start in range(500, len(data), CHUNK))]
    for part in parts:
        os.write(written, part)
        assert rank.pass_on()
        assert rank.last_words in ("", "m" * 900, "the last")
    os.close(written)
    while rank.pass_on():
        pass
    os.close(output)
    assert capfd.readouterr().err.encode() == data
    assert rank.last_words == "the last"


def test_a_line_above_the_limit_is_forwarded_in_parts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_launcher, "LONGEST_LINE", 100)
    output, written = os.pipe()
    rank = LaunchedRank("training-0", 0, output)
    for _ in range(2):
        os.write(written, b"x" * 101)
        assert rank.pass_on()
    assert capfd.readouterr().err == 2 * ("x" * 101 + "\n")
    for end in (output, written):
        os.close(end)


def test_a_pod_whose_ranks_were_all_ended_by_its_launcher_ended_well() -> None:
    assert pod_end([RankEnd("training-0", -signal.SIGTERM, "", by_launcher=True)])[0] == 0
