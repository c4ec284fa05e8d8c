"""The outbox: order, survival of a broken session, and one answer per command."""

import threading

import pytest

from rlhf_common import control_pb2 as pb
from rlhf_workers.outbox import BATCH_MESSAGES, GATHER_SECONDS, SessionOutbox


def finished(sample: int) -> pb.FinishedSample:
    return pb.FinishedSample(key=pb.SampleKey(sample=sample))


def done(command: int) -> pb.CommandDone:
    return pb.CommandDone(command_id=command)


def send(outbox: SessionOutbox) -> list[str]:
    messages = outbox.unsent()
    outbox.sent(messages)
    return [
        f"done {message.done.command_id}" if message.HasField("done") else f"sample {message.finished.key.sample}"
        for message in messages
    ]


def test_messages_leave_in_order_and_wake_the_writer() -> None:
    woken: list[int] = []
    outbox = SessionOutbox("generation-0", lambda: woken.append(1))
    assert outbox.begin(1)
    outbox.finished(finished(5))
    outbox.done(done(1))
    outbox.finished(finished(6))
    assert len(woken) == 3
    assert send(outbox) == ["sample 5", "done 1", "sample 6"]
    assert send(outbox) == []


def test_a_flood_is_sent_in_parts() -> None:
    outbox = SessionOutbox("generation-0", lambda: None)
    for number in range(BATCH_MESSAGES + 3):
        outbox.finished(finished(number))
    assert (len(send(outbox)), len(send(outbox))) == (BATCH_MESSAGES, 3)


def test_a_command_is_answered_once() -> None:
    outbox = SessionOutbox("generation-0", lambda: None)
    outbox.begin(1)
    outbox.done(done(1))
    outbox.done(done(1))
    assert send(outbox) == ["done 1"]
    outbox.done(done(1))
    assert send(outbox) == []


def test_a_broken_session_drops_everything_but_the_command_that_goes_on() -> None:
    outbox = SessionOutbox("training-0", lambda: None)
    outbox.begin(7, "train")
    outbox.finished(finished(1))
    outbox.fence()
    assert outbox.running() == (7, "train")
    outbox.finished(finished(2))  # still of the old session: samples were not given back yet
    assert not outbox.begin(8)  # a command of the old session, not begun yet
    outbox.done(done(7))
    assert outbox.running() == (7, "train")  # answered, but the answer has not left
    outbox.reopen()
    outbox.finished(finished(3))
    assert send(outbox) == ["done 7", "sample 3"]
    assert outbox.running() == (0, "")


def test_an_answer_that_had_not_left_survives_a_second_break() -> None:
    outbox = SessionOutbox("training-0", lambda: None)
    outbox.begin(7, "train")
    outbox.done(done(7))
    outbox.fence()
    outbox.fence()
    assert send(outbox) == ["done 7"]


def test_answers_of_a_forgotten_command_are_dropped() -> None:
    outbox = SessionOutbox("training-0", lambda: None)
    outbox.begin(1)
    outbox.begin(2)
    outbox.fence()
    outbox.reopen()
    outbox.done(done(2))
    outbox.done(done(1))
    assert send(outbox) == ["done 1"]


def test_the_last_train_is_remembered_even_when_its_answer_is_lost() -> None:
    outbox = SessionOutbox("training-0", lambda: None)
    outbox.begin(1)
    outbox.done(pb.CommandDone(command_id=1, train=pb.TrainResult(iteration=4, version=5)))
    send(outbox)
    outbox.fence()
    assert outbox.last_train is not None
    assert outbox.last_train.version == 5
    outbox.reopen()
    outbox.begin(2)
    outbox.done(pb.CommandDone(command_id=2, failure=pb.Failure(reason="x"), train=pb.TrainResult(version=9)))
    assert outbox.last_train.version == 5


def test_what_a_piece_of_work_says_wakes_the_writer_once_at_its_end() -> None:
    woken: list[int] = []
    outbox = SessionOutbox("inference-0", lambda: woken.append(1), now=lambda: 0.0)
    with outbox.gathered():
        for number in range(40):
            outbox.finished(finished(number))
        assert not woken
    assert len(woken) == 1
    assert send(outbox) == [f"sample {number}" for number in range(40)]
    with outbox.gathered():
        pass
    assert len(woken) == 1


def test_a_piece_of_work_that_fails_has_said_what_it_said() -> None:
    woken: list[int] = []
    outbox = SessionOutbox("inference-0", lambda: woken.append(1), now=lambda: 0.0)

    def piece() -> None:
        with outbox.gathered():
            outbox.finished(finished(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        piece()
    assert len(woken) == 1
    outbox.finished(finished(2))
    assert len(woken) == 2


def test_answers_signs_of_life_and_alarms_wait_for_nothing() -> None:
    woken: list[int] = []
    outbox = SessionOutbox("training-0", lambda: woken.append(1), now=lambda: 0.0)
    outbox.begin(1)
    with outbox.gathered():
        outbox.finished(finished(1))
        outbox.heartbeat(pb.Heartbeat())
        outbox.done(done(1))
        outbox.alarm(pb.Failure(reason="OutOfMemory"))
        assert len(woken) == 3
    assert len(woken) == 3  # what was said before them has left with them


def test_a_long_piece_of_work_is_heard_before_its_end() -> None:
    woken: list[int] = []
    seconds = iter([0.0, GATHER_SECONDS / 2, GATHER_SECONDS, GATHER_SECONDS + 0.001])
    outbox = SessionOutbox("inference-0", lambda: woken.append(1), now=lambda: next(seconds))
    with outbox.gathered():
        outbox.finished(finished(1))
        outbox.finished(finished(2))
        assert not woken
        outbox.finished(finished(3))
        assert len(woken) == 1
        outbox.finished(finished(4))
        assert len(woken) == 1
    assert len(woken) == 2


def test_what_another_thread_says_meanwhile_wakes_at_once() -> None:
    woken: list[int] = []
    outbox = SessionOutbox("generation-0", lambda: woken.append(1), now=lambda: 0.0)
    with outbox.gathered():
        other = threading.Thread(target=outbox.finished, args=(finished(1),))
        other.start()
        other.join()
        assert len(woken) == 1
