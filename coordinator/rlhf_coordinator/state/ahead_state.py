"""Drafts that idle generation workers decode ahead for samples of the next iteration.

In messages, the draft of sample n of an iteration is sample FIRST_AHEAD_SAMPLE + n of it. Prompt, random key and method
of drawing are those of the sample.
Rule: plain data with fixed limits, outside ledger and journal. A coordinator that ends loses all drafts, and only time
with them. Tokens under an attempt that is not a draft's newest are ignored.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlhf_common.samples import Lease
from rlhf_coordinator.state.sample import ITEM_BYTES, PackedResponse

MAX_TOKENS: Final = 1 << 20
"""Most tokens of the drafts of one iteration: 8 MiB with their log-probabilities."""
MAX_DRAFT_TOKENS: Final = 4096
"""Most tokens of one draft."""
MEASURED_TOKENS: Final = 256
"""Number of compared tokens from which the share of right ones counts."""
MIN_SHARE: Final = 0.1
"""Share of right tokens below which nothing is drafted ahead, until older counts have faded."""
REST_SECONDS: Final = 0.05
"""Seconds after the end of a worker's drafts before it gets others."""
FADING: Final = 0.5
"""Factor of the compared tokens of earlier iterations, at the end of each iteration."""


@dataclass(slots=True)
class AheadDraft:
    """The tokens decoded ahead for one sample, and the lease of it."""

    attempt: int
    """Attempt of its newest lease."""
    lease: Lease | None = None
    response: PackedResponse = field(default_factory=PackedResponse)
    complete: bool = False
    """Whether it gets no further lease: it ended, or a worker failed with it."""


@dataclass
class AheadDrafts:
    """The drafts for one iteration."""

    iteration: int = -1
    """Iteration of the samples; -1 for none."""
    drafts: dict[int, AheadDraft] = field(default_factory=dict)
    """Drafts by the number of their sample, those of all samples that were ever leased."""
    leased: dict[str, dict[int, None]] = field(default_factory=dict)
    """Worker -> numbers of the samples that it drafts, in the order of their leases."""
    tokens: int = 0
    """Number of tokens of all drafts."""

    def begin(self, index: int, lease: Lease) -> AheadDraft:
        """Lease the draft of a sample, and return it."""
        draft = self.drafts.setdefault(index, AheadDraft(0))
        draft.attempt, draft.lease = lease.attempt, lease
        self.leased.setdefault(lease.worker, {})[index] = None
        return draft

    def end(self, index: int, *, complete: bool) -> None:
        """End the lease of a draft, if it has one. `complete`: it gets no further lease."""
        draft = self.drafts[index]
        if draft.lease is not None:
            del self.leased[draft.lease.worker][index]
        draft.lease, draft.complete = None, complete or draft.complete

    def take(self, index: int, response: PackedResponse) -> int:
        """Replace the response of a draft by a longer one; return the number of new tokens, 0 for no longer one."""
        draft = self.drafts[index]
        more = len(response) - len(draft.response)
        if more <= 0:
            return 0
        draft.response = response
        self.tokens += more
        return more

    def on(self, worker: str) -> list[int]:
        """Return the samples that a worker drafts, by number."""
        return list(self.leased.get(worker, ()))

    def waiting(self, size: int) -> Iterable[int]:
        """Yield the samples of an iteration of `size` that may be leased: begun ones first, in their order."""
        yield from (index for index, draft in self.drafts.items() if draft.lease is None and not draft.complete)
        yield from (index for index in range(size) if index not in self.drafts)

    def response(self, index: int) -> PackedResponse:
        """Return the tokens decoded ahead for a sample; empty for an unknown one."""
        draft = self.drafts.get(index)
        return PackedResponse() if draft is None else draft.response


@dataclass
class AheadState:
    """The drafts for the iteration in progress and for the next one, and counts of right tokens."""

    current: AheadDrafts = field(default_factory=AheadDrafts)
    """Drafts for the iteration in progress, of which none is decoded any more."""
    upcoming: AheadDrafts = field(default_factory=AheadDrafts)
    """Drafts for the next iteration."""
    attempts: int = 0
    """Number of leases of drafts."""
    not_before: dict[str, float] = field(default_factory=dict)
    """Worker whose drafts were ended -> moment of the monotonic clock before which it gets no others."""
    since: dict[str, float] = field(default_factory=dict)
    """Worker that drafts ahead -> moment of the monotonic clock since when."""
    drafted: int = 0
    """Tokens decoded ahead in the iteration in progress."""
    compared: Counter[int] = field(default_factory=Counter)
    """Tokens of drafts ahead that had a token of their finished sample in their place, in this iteration, by age: the
    number of versions between the weights that drew them."""
    right: Counter[int] = field(default_factory=Counter)
    """Tokens of these before the first difference, by age."""
    parted: int = 0
    """Finished samples of this iteration that differ from their draft."""
    seconds: float = 0.0
    """Seconds of workers that drafted ahead, up to the end of their last leases in this iteration."""
    faded_compared: float = 0.0
    faded_right: float = 0.0
    """Compared and right tokens of earlier iterations, with less weight for older ones."""

    def begin_iteration(self, iteration: int) -> None:
        """Take the drafts for this iteration, and forget those of the one before; reset its counts."""
        self.current = self.upcoming if self.upcoming.iteration == iteration else AheadDrafts(iteration)
        self.upcoming = AheadDrafts(iteration + 1)
        self.faded_compared = FADING * self.faded_compared + self.compared.total()
        self.faded_right = FADING * self.faded_right + self.right.total()
        self.compared, self.right = Counter(), Counter()
        self.drafted, self.parted, self.seconds = 0, 0, 0.0

    def finished(self, index: int, tokens: bytes, version: int) -> tuple[int, int]:
        """Compare a finished response, int32, that this weight version drew with its draft.

        Count the tokens; return how many were compared, and how many are right.
        """
        draft = self.current.response(index)
        compared = min(len(draft), len(tokens) // ITEM_BYTES)
        if not compared:
            return 0, 0
        right, place = common_prefix(draft.tokens, tokens), 0
        for span in draft.versions:
            stop = min(place + span.tokens, compared)
            self.compared[version - span.version] += stop - place
            self.right[version - span.version] += max(0, min(stop, right) - place)
            place = stop
        self.parted += right < compared
        return compared, right

    @property
    def pays(self) -> bool:
        """Whether drafts were right often enough, or too few were compared to know."""
        compared = self.faded_compared + self.compared.total()
        right = self.faded_right + self.right.total()
        return compared < MEASURED_TOKENS or right >= MIN_SHARE * compared

    def find(self, iteration: int, index: int, attempt: int) -> AheadDrafts | None:
        """Return the drafts that have the one that a message is about; None for an unknown or older one."""
        for drafts in (self.upcoming, self.current):
            draft = drafts.drafts.get(index)
            if drafts.iteration == iteration and draft is not None and draft.attempt == attempt:
                return drafts
        return None


def common_prefix(left: bytes, right: bytes) -> int:
    """Return the number of equal tokens at the start of two packed responses."""
    first, second = (memoryview(side).cast("i") for side in (left, right))
    pairs: Sequence[tuple[int, int]] = list(zip(first, second, strict=False))
    return next((place for place, (token, other) in enumerate(pairs) if token != other), len(pairs))
