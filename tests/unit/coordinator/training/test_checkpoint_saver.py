"""A checkpoint whose ranks fail counts as one failed attempt, for any number and timing of failures."""

import asyncio
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.storage import checkpoint
from rlhf_coordinator.training.checkpoint_saver import MAX_TRIES, CheckpointSaver

RANKS = ("training-0", "training-1")


class Saving:
    """A coordinator that asks two ranks for checkpoints, and their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.run: JobRun
        self.run, restored = begin_in_process(folder, make_job(folder))
        self.saver = CheckpointSaver(self.run)
        actions, self.handlers = Actions(self.run, self.saver), EventHandlers(self.run, self.saver)
        resume_iteration(self.run, restored, actions)

    def begin(self) -> dict[str, int]:
        """Ask all ranks; return the command of each."""
        self.saver.begin(1)
        return {rank: next(iter(self.run.state.fleet.workers[rank].pending)) for rank in RANKS}

    def fails(self, rank: str, command: int, message: str = "No space left on device") -> None:
        failure = pb.Failure(reason="StorageFull", message=message)
        self.handlers.message(rank, pb.WorkerMessage(done=pb.CommandDone(command_id=command, failure=failure)))


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(tmp_path)


def test_a_disk_that_is_full_for_all_ranks_is_one_failed_try(saving: Saving) -> None:
    """Each rank once counted as an attempt: with three ranks a job ended without a second one."""
    for tries in range(1, MAX_TRIES):
        commands = saving.begin()
        for rank in RANKS:
            saving.fails(rank, commands[rank])
        assert (saving.run.state.checkpoint.tries, saving.run.state.failure) == (tries, None)
        assert saving.run.totals.checkpoint_failures == tries
        assert list(saving.folder.iterdir()) == []
    commands = saving.begin()
    for rank in RANKS:
        saving.fails(rank, commands[rank])
    assert saving.run.state.failure is not None
    assert saving.run.state.failure.field == "spec.checkpoints.path"


def test_the_words_of_a_failed_try_are_those_of_the_rank_that_failed_first(saving: Saving) -> None:
    """Other ranks may find their folder gone, which is a consequence of the failure and not its cause."""
    for _ in range(MAX_TRIES):
        commands = saving.begin()
        saving.fails(RANKS[1], commands[RANKS[1]])
        saving.fails(RANKS[0], commands[RANKS[0]], "No such file or directory")
    assert saving.run.state.failure is not None
    assert saving.run.state.failure.message == "No space left on device"


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError("identity"), OSError("gone")])
async def test_a_checkpoint_that_cannot_be_completed_is_a_failed_try(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Any other error than one of the disk once left the saver waiting, and no later checkpoint was made."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "finish", refuse)
    for tries in range(1, MAX_TRIES + 1):
        saving.begin()
        for rank in RANKS:
            saving.saver.written(rank, pb.CheckpointResult())
        assert saving.run.state.checkpoint.stage == "finalizing"
        await asyncio.wait(saving.run.background._tasks)
        assert (saving.run.state.checkpoint.stage, saving.run.state.checkpoint.tries) == ("idle", tries)
    assert saving.run.state.failure is not None
    assert str(error) in saving.run.state.failure.message
    assert saving.run.state.failure.field == "spec.checkpoints.path"
