"""A row of a sample table, to be changed by tests."""

from rlhf_coordinator.reports.sample_table import SampleRow


def sample_row() -> SampleRow:
    """A sample that was judged and trained on, and moved once."""
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
    )
