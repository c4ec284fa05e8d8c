"""The job's learned statistics of drafts, stored with the job and sent to new workers: counts, and means of passes.

Reading raises ValueError for invalid data.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from rlhf_planner.speculation.acceptance import KEPT_AT_UPDATE, WINDOW, Acceptance
from rlhf_planner.speculation.controller import DraftController
from rlhf_planner.speculation.step_records import batch_class, budget_class

FACTS_KEY: Final = "speculation"
"""Key of `document` in the job's facts."""
MAX_DRAFTERS, MAX_MATCHES, MAX_POSITIONS = 8, 64, 64
"""Limits on data from others."""
PASSES: Final = 64.0
"""Passes of a class that are remembered."""
GIVEN_PASSES: Final = 8
"""Maximum number of passes of a class that a worker starts with."""
MAX_SECONDS: Final = 3600.0
"""Maximum seconds of a pass."""

Cell = tuple[str, int, int]
"""(drafter, match, position)."""


class Counted(NamedTuple):
    """Judged tokens of a cell, and accepted ones among them."""

    judged: float
    accepted: float


class MeanPass(NamedTuple):
    """Number of passes, and their means."""

    passes: float
    samples: float
    slots: float
    """Mean number of verified drafted tokens."""
    keys: float
    """Mean keys that all samples together read without drafts."""
    seconds: float


@dataclass(frozen=True)
class LearnedDrafts:
    """Counts by cell, and passes by classes of batch and budget."""

    counts: Mapping[Cell, Counted] = field(default_factory=dict)
    passes: Mapping[tuple[int, int], MeanPass] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether anything was learned."""
        return bool(self.counts or self.passes)

    def observed(self, counts: Mapping[Cell, Counted], passes: Iterable[MeanPass]) -> "LearnedDrafts":
        """Return the statistics with counts and passes of a worker. Raises ValueError for impossible values."""
        merged = dict(self.counts)
        for cell, counted in counts.items():
            check_counted(cell, counted)
            before = merged.get(cell, Counted(0.0, 0.0))
            judged, accepted = before.judged + counted.judged, before.accepted + counted.accepted
            over = max(1.0, judged / WINDOW)
            merged[cell] = Counted(judged / over, accepted / over)
        if len({drafter for drafter, _, _ in merged}) > MAX_DRAFTERS:
            raise ValueError(f"drafts of more than {MAX_DRAFTERS} drafters")
        means = dict(self.passes)
        for item in passes:
            check_pass(item)
            key = pass_class(item)
            means[key] = _merged(means.get(key), item)
        return LearnedDrafts(merged, means)

    def aged(self, share: float = KEPT_AT_UPDATE) -> "LearnedDrafts":
        """Return the statistics after an update of the policy's weights: acceptance counts less, passes do not."""
        counts = {
            cell: Counted(counted.judged * share, counted.accepted * share) for cell, counted in self.counts.items()
        }
        return replace(self, counts=counts)

    def given_to(self, controller: DraftController, drafters: Sequence[str]) -> DraftController:
        """Return a controller initialized with the statistics of its drafters, by name, and of passes."""
        judged, accepted = controller.acceptance.judged.copy(), controller.acceptance.accepted.copy()
        places = {name: place for place, name in enumerate(drafters)}
        _, matches, positions = judged.shape
        for (drafter, match, position), counted in self.counts.items():
            if drafter in places and match < matches and position < positions:
                judged[places[drafter], match, position] += counted.judged
                accepted[places[drafter], match, position] += counted.accepted
        over = np.maximum(judged / WINDOW, 1.0)
        costs = controller.pass_costs
        for _, item in sorted(self.passes.items()):
            rows, pass_rows = max(1, round(item.samples)), max(1, round(item.samples + item.slots))
            keys = round(item.keys * pass_rows / rows)
            for _ in range(min(GIVEN_PASSES, math.ceil(item.passes))):
                costs = costs.observed(pass_rows, keys, item.slots > 0, max(item.seconds, 1e-9))
        return replace(controller, acceptance=Acceptance(judged / over, accepted / over), pass_costs=costs)

    # ------------------------------------------------------------ in a file

    def document(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        return {
            "counts": [[*cell, *counted] for cell, counted in sorted(self.counts.items())],
            "passes": [list(item) for _, item in sorted(self.passes.items())],
        }

    @classmethod
    def from_document(cls, document: Any) -> "LearnedDrafts":
        """Return the statistics that `document` wrote. Raises ValueError for invalid data."""
        try:
            counts = {
                (str(drafter), int(match), int(position)): Counted(float(judged), float(accepted))
                for drafter, match, position, judged, accepted in document["counts"]
            }
            passes = [MeanPass(*map(float, item)) for item in document["passes"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the learned draft statistics cannot be read: {error!r}") from None
        return cls().observed(counts, passes)


def pass_class(item: MeanPass) -> tuple[int, int]:
    """Return the class of passes, by samples and by drafted tokens per sample."""
    return batch_class(max(1, round(item.samples))), budget_class(round(item.slots), max(1, round(item.samples)))


def check_counted(cell: Cell, counted: Counted) -> None:
    """Raise ValueError with the field and valid values unless the counts are valid."""
    drafter, match, position = cell
    if not 0 < len(drafter) <= 64:
        raise ValueError(f"counts of drafts: the drafter's name has {len(drafter)} characters, must have 1 to 64")
    if not (0 <= match < MAX_MATCHES and 0 <= position < MAX_POSITIONS):
        most = f"0 to {MAX_MATCHES - 1} and 0 to {MAX_POSITIONS - 1}"
        raise ValueError(f"counts of drafts: match {match} and position {position} must be {most}")
    if not 0 <= counted.accepted <= counted.judged < math.inf:
        judged = f"{counted.accepted} accepted of {counted.judged} judged"
        raise ValueError(f"counts of drafts: {judged}, must be 0 to the number judged")


def check_pass(item: MeanPass) -> None:
    """Raise ValueError with the passes and valid values unless the passes are valid."""
    if not all(0 <= value < math.inf for value in item):
        raise ValueError(f"{item}: must be finite numbers from 0")
    if not (item.passes > 0 and item.samples >= 1 and 0 < item.seconds <= MAX_SECONDS):
        raise ValueError(f"{item}: must be of one pass and one sample at least, in at most {MAX_SECONDS:g} s")


def _merged(before: MeanPass | None, item: MeanPass) -> MeanPass:
    if before is None:
        return item._replace(passes=min(item.passes, PASSES))
    share = item.passes / (before.passes + item.passes)
    means = (old + share * (new - old) for old, new in zip(before[1:], item[1:], strict=True))
    return MeanPass(min(before.passes + item.passes, PASSES), *means)
