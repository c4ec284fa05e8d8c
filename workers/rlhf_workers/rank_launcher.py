"""Runs the training ranks of one pod, each as a worker process: `python -m rlhf_workers.rank_launcher`.

The launcher starts each rank once and restarts none. When a rank fails, the others get LEAVE_SECONDS to end, and are
killed then. When the launcher is killed, the kernel kills its ranks. Rule: it forks the ranks before a second thread
exists.
"""

import contextlib
import ctypes
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from rlhf_common.json_document import parse_json
from rlhf_common.names import Env, ExitCode
from rlhf_workers.ranks.ends import RankEnd, pod_end
from rlhf_workers.ranks.environments import RankEnvironment, rank_environments
from rlhf_workers.settings import SettingsError

log = logging.getLogger("rlhf_workers")

COMMAND: Final = ("-m", "rlhf_workers")
LEAVE_SECONDS: Final = 5.0
"""Seconds that ranks get to end after one was lost."""
LET_GO_SECONDS: Final = 60.0
"""Seconds that ranks get to end after the first one ended with success, if the launcher is not asked to stop."""
LOOK_SECONDS: Final = 1.0
HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2)."""
CHUNK: Final = 1 << 16
"""Maximum bytes per read."""
LONGEST_LINE: Final = 1 << 20
"""Bytes above which a line is forwarded in parts, each with a line end."""
WORDS_KEPT: Final = 2000
"""Maximum characters stored of a rank's last line, from its end."""


class LaunchedRank:
    """A started rank."""

    def __init__(self, name: str, pid: int, output: int) -> None:
        """`output` is the file descriptor of its output."""
        self.name, self.pid, self.output = name, pid, output
        self.code: int | None = None
        self.asked = False
        """Whether it got SIGTERM from the launcher."""
        self.last_words = ""
        self._pending = b""

    def pass_on(self) -> bool:
        """Forward lines of its output, see LONGEST_LINE; return False at the end of the output."""
        try:
            more = os.read(self.output, CHUNK)
        except BlockingIOError:
            return True
        self._pending += more
        end = self._pending.rfind(b"\n") + 1
        if not more or len(self._pending) - end > LONGEST_LINE:
            end = len(self._pending)
        lines, self._pending = self._pending[:end], self._pending[end:]
        if lines.strip():
            self.last_words = words_of(lines.strip().rsplit(b"\n", 1)[-1])
            lines = lines if lines.endswith(b"\n") else lines + b"\n"
        while lines:
            lines = lines[os.write(2, lines) :]
        return bool(more)


def words_of(line: bytes) -> str:
    """Return the end of the text of a log line: of the message of a JSON line, or of any other line itself."""
    text = line.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(parse_json(text)["message"])
    return text.strip()[-WORDS_KEPT:]


class RankLauncher:
    """Starts the ranks of a pod and ends with them, on one thread beside the endpoint's."""

    def __init__(self, environments: Sequence[RankEnvironment]) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._ends: list[RankEnd] = []
        self._kill_at: float | None = None
        self._restart_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._ranks: list[LaunchedRank] = []
        for each in environments:
            self._ranks.append(self._start(each))

    def run(self) -> tuple[int, str]:
        """Forward the ranks' output and end ranks when due, until none runs; return the exit code and the reason."""
        while any(rank.code is None for rank in self._ranks):
            for key, _ in self._selector.select(LOOK_SECONDS):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, CHUNK)
                elif not key.data.pass_on():
                    self._selector.unregister(key.fd)
            self._reap()
            self._ask()
            self._end_the_rest()
        return pod_end(self._ends)

    def kill(self) -> None:
        """Kill every rank that still runs."""
        for rank in self._ranks:
            if rank.code is None:
                os.kill(rank.pid, signal.SIGKILL)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _ask(self) -> None:
        for rank in self._ranks:
            if self._stopping and rank.code is None and not rank.asked:  # not reaped, so the id is still its own
                rank.asked = True
                os.kill(rank.pid, signal.SIGTERM)

    def _start(self, rank: RankEnvironment) -> LaunchedRank:
        launcher, (output, written) = os.getpid(), os.pipe()
        # Block signals until the child has its own handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        pid = os.fork()
        if pid == 0:
            _become(rank, launcher, written)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(written)
        os.set_blocking(output, False)
        started = LaunchedRank(rank.name, pid, output)
        self._selector.register(output, selectors.EVENT_READ, started)
        return started

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for rank in self._ranks:
                if rank.pid == pid and rank.code is None:
                    self._ended(rank, os.waitstatus_to_exitcode(status))

    def _ended(self, rank: LaunchedRank, code: int) -> None:
        while rank.output in self._selector.get_map():
            if not _readable(rank.output):  # a grandchild may still hold the other end
                break
            if not rank.pass_on():
                self._selector.unregister(rank.output)
        rank.code = code
        killed = self._kill_at is not None and time.monotonic() >= self._kill_at and code == -signal.SIGKILL
        # A rank that still loads has no handler for SIGTERM yet.
        ended = killed or (rank.asked and code == -signal.SIGTERM)
        self._ends.append(RankEnd(rank.name, code, rank.last_words, by_launcher=ended))

    def _end_the_rest(self) -> None:
        now = time.monotonic()
        if self._kill_at is None and any(end.code and not end.by_launcher for end in self._ends):
            self._kill_at = now + LEAVE_SECONDS
        if self._restart_at is None and self._ends and not self._stopping:
            self._restart_at = now + LET_GO_SECONDS
        if self._restart_at is not None and now >= self._restart_at and self._kill_at is None and not self._stopping:
            self._ends.append(
                RankEnd(self._ends[0].rank, ExitCode.RESTART, "it was released, but the other ranks were not")
            )
            self._kill_at = now
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()


def _readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def _become(rank: RankEnvironment, launcher: int, output: int) -> NoReturn:
    """Run the child: tie its life to the launcher's and execute the rank."""
    try:
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != launcher:
            os._exit(ExitCode.FAILED)
        for target in (1, 2):
            os.dup2(output, target)
        os.execve(sys.executable, [sys.executable, *COMMAND], rank.environment)  # noqa: S606 our own module
    except BaseException as error:
        os.write(2, f"{rank.name} cannot be started: {error!r}\n".encode())
        os._exit(ExitCode.FAILED)


def main() -> int:
    """Run the ranks of this pod; return the exit code of the container."""
    try:
        environments = rank_environments(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.USAGE
    launcher = RankLauncher(environments)
    try:
        # Imported after the forks, so that the ranks start sooner.
        from rlhf_workers.logs import configure_logs

        pod = f"{os.environ[Env.GROUP]}-pod-{os.environ[Env.INDEX]}"
        configure_logs(pod, json_lines=os.environ.get(Env.LOG_FORMAT) == "json")
        named = ", ".join(each.name for each in environments)
        log.info("pid %d, ranks of this pod: %s", os.getpid(), named)
        return _run(launcher, environments)
    finally:
        launcher.kill()


def _run(launcher: RankLauncher, environments: Sequence[RankEnvironment]) -> int:
    from rlhf_workers.addresses import AddressInUseError, open_endpoint
    from rlhf_workers.ranks.endpoint import ailment_of, metrics_of_ranks

    try:
        endpoint = open_endpoint(os.environ.get(Env.METRICS, ""))
    except (AddressInUseError, SettingsError) as error:
        log.error("%s", error)
        return ExitCode.ADDRESS_IN_USE if isinstance(error, AddressInUseError) else ExitCode.USAGE
    if endpoint is not None:
        addresses = {each.name: each.endpoint for each in environments}
        endpoint.ailment, endpoint.metrics = ailment_of(addresses), metrics_of_ranks(addresses)
    code, why = launcher.run()
    log.log(logging.INFO if code in (ExitCode.OK, ExitCode.RESTART) else logging.ERROR, "%s", why)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
