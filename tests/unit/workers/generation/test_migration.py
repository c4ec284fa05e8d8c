"""The source's side of Migrate, step by step: data of a transfer, and when a sample stops, stays or leaves."""

from collections.abc import Iterator

import pytest
from tests.support.workers.engine_driving import MakeEngine, finish, requests
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import unpack
from rlhf_workers.generation.migration import outgoing
from rlhf_workers.generation.migration.kv_transfer import TransferOutcome
from rlhf_workers.generation.migration.outgoing import OutgoingMigrations
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.kv_slices import KvSlice
from rlhf_workers.sample_codec import key_message


class PlayedTransfer:
    """A call whose other end is the test."""

    def __init__(self, channel: object, offer: pb.KvOffer, seconds: float) -> None:
        self.offer = offer
        self.taken, self.backlog, self.bytes = False, 0, 0
        self.outcome: TransferOutcome | None = None
        self.pieces: list[KvSlice] = []
        self.handed_over: pb.KvHandOver | None = None
        ALL.append(self)

    def send(self, piece: KvSlice) -> None:
        self.backlog += 1
        self.pieces.append(piece)

    def hand_over(self, message: pb.KvHandOver) -> None:
        self.handed_over = message

    def cancel(self, why: str) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = TransferOutcome(False, why, 0.0)
        return True


ALL: list[PlayedTransfer] = []


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(outgoing, "KvTransfer", PlayedTransfer)
    ALL.clear()
    yield
    ALL.clear()


def endless(engine: TorchEngine) -> TorchEngine:
    """Responses end only at their limit."""
    engine._stop.is_stop[:] = False
    return engine


def begin(engine: TorchEngine, count: int, *, moves: int = 1) -> tuple[OutgoingMigrations, RecordedOutbox]:
    """Return `count` samples after a few steps, the first `moves` of them moving."""
    samples = requests(count, seed=4, response=90)
    engine.submit(samples)
    for _ in range(3):
        engine.step()
    migrations, outbox = OutgoingMigrations(engine, None), RecordedOutbox()
    keys = [pb.MigrateSample(key=key_message(sample.key), new_attempt=5) for sample in samples[:moves]]
    migrations.begin(7, pb.Migrate(destination="127.0.0.1:1", samples=keys, timeout_seconds=60), outbox)
    return migrations, outbox


def test_a_sample_is_decoded_on_until_its_prefix_has_left_and_forgotten_at_the_receipt(make_engine: MakeEngine) -> None:
    engine = endless(make_engine())
    migrations, outbox = begin(engine, 2)
    migrations.step()
    (transfer,) = ALL
    assert transfer.offer.version == 0
    assert transfer.offer.sample.key.attempt == 5
    engine.step()
    assert not migrations.step()
    assert not transfer.pieces  # nothing before the offer is taken
    transfer.taken = True
    key = requests(1, seed=4)[0].key
    while transfer.handed_over is None:
        before = len(engine.moves.carried(key).tokens)
        migrations.step()
        engine.step()
        if transfer.handed_over is None:
            assert len(engine.moves.carried(key).tokens) == before + 1
            transfer.backlog = 0
    stop = engine.moves.cached(key)
    assert [piece.start for piece in transfer.pieces] == [0, *[piece.stop for piece in transfer.pieces[:-1]]]
    assert transfer.pieces[-1].stop == transfer.handed_over.positions == stop
    assert len(transfer.pieces) == 2
    length = len(unpack(transfer.handed_over.sample.tokens))
    for _ in range(3):
        engine.step()
        migrations.step()
    assert len(engine.moves.carried(key).tokens) == length
    assert not outbox.reports("done")
    transfer.outcome = TransferOutcome(True, "", 0.0)
    migrations.step()
    assert engine.moves.cached(key) is None
    (done,) = outbox.reports("done")
    assert (done.command_id, done.migrate.samples[0].moved) == (7, True)
    assert done.migrate.samples[0].progress == transfer.handed_over.sample
    assert list(finish(engine)) == [1]


@pytest.mark.parametrize("why", ["refused", "withdrawn", "no receipt within 0 s of the pause"])
def test_a_sample_that_is_not_taken_goes_on(why: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = finish(endless(make_engine()), requests(2, seed=4, response=90))
    engine = endless(make_engine())
    migrations, outbox = begin(engine, 2)
    migrations.step()
    ALL[0].taken = True
    while ALL[0].handed_over is None:
        migrations.step()
        engine.step()
        ALL[0].backlog = 0
    if why == "refused":
        ALL[0].outcome = TransferOutcome(False, why, 0.0)
        migrations.step()
    elif why == "withdrawn":
        migrations.stop(None, why)
    else:
        monkeypatch.setattr(outgoing, "RECEIPT_SECONDS", 0.0)
        for _ in range(2):  # the first ends the transfer at the latest, the second takes its outcome
            migrations.step()
    assert outbox.reports("done")[0].migrate.samples[0].why == why
    done = finish(engine)
    assert all(done[number].tokens.tolist() == response.tokens.tolist() for number, response in undisturbed.items())


def test_a_receipt_that_came_before_the_cancellation_counts(make_engine: MakeEngine) -> None:
    engine = endless(make_engine())
    migrations, outbox = begin(engine, 1)
    migrations.step()
    ALL[0].taken = True
    while ALL[0].handed_over is None:
        migrations.step()
        ALL[0].backlog = 0
    ALL[0].outcome = TransferOutcome(True, "", 0.0)
    migrations.stop(None, "the session broke")
    assert outbox.reports("done")[0].migrate.samples[0].moved
    assert engine.in_flight == 0


def test_a_slow_link_stops_a_sample_after_a_few_rounds(make_engine: MakeEngine) -> None:
    engine = endless(make_engine())
    migrations, _ = begin(engine, 1)
    migrations.step()
    ALL[0].taken = True
    rounds = 0
    while ALL[0].handed_over is None:
        migrations.step()
        rounds += 1
        for _ in range(20):  # decoded while a piece is on its way
            engine.step()
        ALL[0].backlog = 0
    assert rounds <= outgoing.ROUNDS + 1


def test_few_transfers_run_at_once_and_a_sample_moves_once(make_engine: MakeEngine) -> None:
    engine = endless(make_engine())
    migrations, outbox = begin(engine, 7, moves=6)
    again = pb.MigrateSample(key=key_message(requests(1, seed=4)[0].key), new_attempt=6)
    migrations.begin(8, pb.Migrate(destination="127.0.0.1:1", samples=[again, again]), outbox)
    migrations.step()
    assert len(ALL) == outgoing.TRANSFERS
    (done,) = outbox.reports("done")
    assert [moved.why for moved in done.migrate.samples] == ["it is already moving"] * 2
    ALL[0].outcome = TransferOutcome(False, "refused", 0.0)
    migrations.step()
    migrations.step()
    assert len(ALL) == outgoing.TRANSFERS + 1
    migrations.stop(None, "over")
    assert [done.command_id for done in outbox.reports("done")] == [8, 7]
    assert len(finish(engine)) == 7


def test_a_sample_whose_cache_was_given_up_while_it_moved_stays(make_engine: MakeEngine) -> None:
    """An engine does this if it preempts a sample for others and computes it again."""
    engine = endless(make_engine())
    migrations, outbox = begin(engine, 1)
    migrations.step()
    (transfer,) = ALL
    transfer.taken = True
    migrations.step()
    assert transfer.pieces
    key = requests(1, seed=4)[0].key
    again = engine.moves.carried(key)
    engine.withdraw([key])
    engine.submit([again])
    migrations.step()
    (done,) = outbox.reports("done")
    (result,) = done.migrate.samples
    assert (result.moved, result.why) == (False, "its cache was given up for other samples meanwhile")
    assert list(finish(engine)) == [0]
