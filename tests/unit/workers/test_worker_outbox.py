"""The outbox: order, what survives a broken session, and that a command is answered once."""

from rlhf_api import control_pb2 as pb
from rlhf_workers.outbox import BATCH_MESSAGES, SessionOutbox


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
