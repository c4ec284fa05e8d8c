"""A reward that reads the prompt's record: the share of the requested words that occur, or no judgement."""

from typing import Any


def score(prompt: str, response: str, record: dict[str, Any]) -> float | None:
    """Score one response; `record` is the prompt's line of the JSONL file."""
    wanted = record.get("words")
    if not wanted:
        return None  # abstain: the sample is not trained on, which differs from a reward of 0
    said = set(response.lower().split())
    return sum(word in said for word in wanted) / len(wanted)
