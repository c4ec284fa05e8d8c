"""User reward functions in real child processes: concurrency, hangs, crashes, and children that never outlive us."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.workers.reward_samples import sample

from rlhf_api.job.rewards import RewardFunction
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.function import FunctionReward
from rlhf_workers.user_code import user_processes

FUNCTION = """
import asyncio, os, time

def sync(prompt, response, record):
    print("noise on stdout")
    if response == "hang":
        while True: time.sleep(60)
    if response == "spin":
        while True: pass
    if response == "die":
        os.kill(os.getpid(), 11)
    if response == "exit":
        raise SystemExit(3)
    if response == "raise":
        raise KeyError("answer")
    if response == "nan":
        return float("nan")
    if response.startswith("sleep"):
        time.sleep(float(response[5:]))
        return os.getpid()
    if response == "environment":
        return float("HF_TOKEN" in os.environ)
    if response == "pid":
        return os.getpid()
    if response == "none":
        return None
    return len(prompt) + len(response) + record["bonus"]

met = []

async def concurrent(prompt, response, record):
    if response == "meet":
        met.append(response)
        while len(met) < 20:
            await asyncio.sleep(0.01)
    if response == "block":
        time.sleep(60)
    if response == "hang":
        await asyncio.sleep(60)
    if response.startswith("sleep"):
        await asyncio.sleep(float(response[5:]))
    return os.getpid()
"""


@asynccontextmanager
async def running(
    folder: Path, name: str = "sync", seconds: float = 20.0, children: int = 2, text: str = FUNCTION
) -> AsyncIterator[FunctionReward]:
    file = folder / "reward.py"
    file.write_text(text)
    source = FunctionReward(
        RewardFunction(file=str(file), name=name), seconds, threads=1, children=children, field="spec.models.reward"
    )
    await source.start()
    try:
        yield source
    finally:
        await source.close()


async def outcome(source: FunctionReward, response: str) -> float | str | None:
    """Return the reward, or `Reason: message` of the failure."""
    try:
        return (await source.score(sample(response))).reward
    except WorkError as error:
        failure = error.failure
        return f"{failure.reason}: {failure.message}" if failure.retryable and failure.exit_code == 20 else str(failure)


async def test_a_function_in_a_file_is_called_with_prompt_response_and_record(tmp_path: Path) -> None:
    async with running(tmp_path) as source:
        assert (await source.score(sample("four", "x" * 100_000))).reward == 100_004.5
        assert await outcome(source, "none") is None
        assert (await source.score(sample("line\nbreak \u2028 ü"))).reward == 1 + 14 + 0.5


async def test_failures_are_told_and_the_next_sample_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with running(tmp_path) as source:
        raised = await outcome(source, "raise")
        assert raised == "RewardRaised: the function raised: reward.py:15 in sync: KeyError: 'answer'"
        assert "SystemExit: 3" in str(await outcome(source, "exit"))
        assert str(await outcome(source, "nan")).startswith("RewardInvalid: the function returned nan (float)")
        assert await outcome(source, "environment") == 0.0
        assert await outcome(source, "die") == "RewardDied: the function's process ended: signal SIGSEGV"
        assert await outcome(source, "four") == 5.5


@pytest.mark.parametrize("how", ["hang", "spin"])
async def test_a_hanging_call_is_killed_at_the_time_out_and_the_others_go_on(tmp_path: Path, how: str) -> None:
    async with running(tmp_path, seconds=3.0, children=1) as source:
        hanging, *others = await asyncio.gather(*(outcome(source, text) for text in [how, "a", "bb", "ccc"]))
        assert hanging == "RewardTimeout: the function did not return within 3 s; its process was killed"
        assert others == [2.5, 3.5, 4.5]


async def test_slow_synchronous_calls_run_in_several_processes(tmp_path: Path) -> None:
    async with running(tmp_path, children=4) as source:
        pids = await asyncio.gather(*(outcome(source, "sleep1.0") for _ in range(4)))
        assert len(set(pids)) > 1


async def test_quick_calls_need_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_processes, "GROW_SECONDS", 60.0)  # all of them together are faster on any machine
    async with running(tmp_path, children=4) as source:
        assert len(set(await asyncio.gather(*(outcome(source, "pid") for _ in range(200))))) == 1


async def test_asynchronous_calls_share_a_process_and_survive_a_neighbours_hang(tmp_path: Path) -> None:
    async with running(tmp_path, name="concurrent", seconds=4.0) as source:
        pids = await asyncio.gather(*(outcome(source, "meet") for _ in range(20)))
        assert len(set(pids)) == 1
        blocking = asyncio.create_task(outcome(source, "block"))
        await asyncio.sleep(0.7)
        later = await outcome(source, "sleep0.1")  # stuck behind the blocked loop; repeated in a new process
        assert str(await blocking).startswith("RewardTimeout")
        assert isinstance(later, float)
        assert later not in pids


async def test_cancelled_calls_free_their_process(tmp_path: Path) -> None:
    async with running(tmp_path, children=1) as source:
        hanging = asyncio.create_task(source.score(sample("hang")))
        await asyncio.sleep(0.3)
        hanging.cancel()
        assert await asyncio.wait_for(outcome(source, "four"), 120) == 5.5


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("def sync(:\n", "spec.models.reward.function.file", "SyntaxError"),
        ("def score(a, b, c): ...\n", "spec.models.reward.function.name", "has no sync; it defines score"),
        ("import os\nos._exit(9)\n", "spec.models.reward.function", "ended: exit status 9"),
    ],
)
async def test_a_function_that_cannot_start_fails_before_the_first_sample(
    tmp_path: Path, text: str, field: str, words: str
) -> None:
    with pytest.raises(WorkError) as caught:
        async with running(tmp_path, text=text):
            pass
    failure = caught.value.failure
    assert (failure.reason, failure.field, failure.exit_code) == ("RewardFunctionInvalid", field, 20)
    assert not failure.retryable
    assert words in failure.message


PARENT = """
import asyncio, os, sys
from rlhf_api.job.rewards import RewardFunction
from rlhf_workers.inference.rewards.function import function_code
from rlhf_workers.inference.rewards.reward_source import described
from rlhf_workers.user_code.user_process import UserProcess

async def main():
    function = RewardFunction(file=sys.argv[1], name="sync")
    child = await UserProcess.start(function_code(function, 1, field="spec.models.reward.function"), 20.0)
    print(child._process.pid, flush=True)
    from tests.support.workers.reward_samples import sample
    await child.ask({"many": False, "samples": [described(sample(sys.argv[2]))]})

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_child_dies_with_its_worker(tmp_path: Path, how: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file), how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # dead, and this machine's init does not collect it
            return
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
