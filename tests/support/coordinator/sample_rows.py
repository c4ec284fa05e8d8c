"""A row of a sample table and the histories of an iteration, for tests to change."""

from typing import Any

from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.sample_table import SampleRow


def sample_row() -> SampleRow:
    """Return a sample that was judged and trained on, and moved once."""
    return SampleRow(
        iteration=2,
        sample=3,
        group=1,
        line=17,
        prompt="2+3=",
        response="5",
        response_tokens=2,
        finish_reason="stop",
        reward=1.0,
        rewards={"reward": 1.0},
        advantage=-0.25,
        abstained=False,
        failed=False,
        workers=("generation-0", "generation-1"),
        weight_versions=((2, 2),),
        drafted_tokens=4,
        accepted_tokens=1,
        migrated=True,
        cut=False,
        shaped_reward=0.75,
    )


def sample_histories(iteration: int = 2, **changed: Any) -> SampleHistories:
    """Return two samples, of which the second moved and had drafts."""
    whole: dict[str, Any] = {
        "iteration": iteration,
        "began_ns": 1_700_000_000_000_000_000 + iteration * 4_000_000_000,
        "workers": ["generation-0", "generation-1"],
        "prompts": [3, 4],
        "responses": [5, 40],
        "places": [[(0.1, 0)], [(0.1, 0), (0.6, 1)]],
        "finished": [0.5, 1.2],
        "scored": [0.7, 1.4],
        "versions": [[(iteration, 5)], [(iteration, 40)]],
        "drafted": [0, 24],
        "accepted": [0, 13],
        "rewards": [1.0, 0.25],
        "left_out": {},
    }
    return SampleHistories(**{**whole, **changed})
