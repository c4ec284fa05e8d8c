"""Registers the causes. The order breaks ties between equal losses.

To add a cause: write a class in `causes` that follows `finding.LossCause`, and add a line here.
"""

from typing import Final

from rlhf_planner.explain.causes.bubbles import Bubbles
from rlhf_planner.explain.causes.few_generation_workers import FewGenerationWorkers
from rlhf_planner.explain.causes.intervals import SeldomCheckpoints, SeldomEvaluations
from rlhf_planner.explain.causes.long_tail import LongTail
from rlhf_planner.explain.causes.low_acceptance import LowAcceptance
from rlhf_planner.explain.causes.publishing import Publishing
from rlhf_planner.explain.causes.recovery import Recovery
from rlhf_planner.explain.causes.scoring_overlap import ScoringOverlap
from rlhf_planner.explain.causes.scoring_waits import ScoringWaits
from rlhf_planner.explain.causes.slow_worker import SlowWorker
from rlhf_planner.explain.causes.small_batches import SmallBatches
from rlhf_planner.explain.finding import LossCause

CAUSES: Final[tuple[LossCause, ...]] = (
    Recovery(),
    SlowWorker(),
    ScoringWaits("slow reward", call=True),
    ScoringWaits("too few inference workers", call=False),
    ScoringOverlap(),
    SmallBatches(),
    FewGenerationWorkers(),
    LowAcceptance(),
    LongTail(),
    Bubbles(),
    Publishing(),
    SeldomCheckpoints(),
    SeldomEvaluations(),
)
