"""Converts learned statistics of drafts to protobuf messages and back. `LearnedDrafts` validates the values."""

from rlhf_common import control_pb2 as pb
from rlhf_planner.speculation.learned_drafts import Cell, Counted, LearnedDrafts, MeanPass


def counts_of(message: pb.LearnedDrafts) -> dict[Cell, Counted]:
    """Return the counts of a message, by cell."""
    counts: dict[Cell, Counted] = {}
    for count in message.counts:
        counts[count.drafter, count.match, count.position] = Counted(count.judged, count.accepted)
    return counts


def passes_of(message: pb.LearnedDrafts) -> list[MeanPass]:
    """Return the passes of a message."""
    return [MeanPass(item.steps, item.samples, item.slots, item.keys, item.seconds) for item in message.steps]


def learned_of(message: pb.LearnedDrafts) -> LearnedDrafts:
    """Return the statistics in a message. Raises ValueError for invalid values."""
    return LearnedDrafts().observed(counts_of(message), passes_of(message))


def learned_message(learned: LearnedDrafts) -> pb.LearnedDrafts:
    """Return a message with the statistics, for `learned_of`."""
    message = pb.LearnedDrafts()
    for (drafter, match, position), (judged, accepted) in learned.counts.items():
        message.counts.add(
            drafter=drafter, match=match, position=position, drafted=judged, judged=judged, accepted=accepted
        )
    for item in learned.passes.values():
        add_pass(message, item)
    return message


def add_pass(message: pb.LearnedDrafts, item: MeanPass) -> None:
    """Add passes of similar size to a message."""
    message.steps.add(steps=item.passes, samples=item.samples, slots=item.slots, keys=item.keys, seconds=item.seconds)
