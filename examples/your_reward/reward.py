"""A reward that reads the prompt's record: the share of the words that were asked for, or no judgement at all."""

from typing import Any


def score(prompt: str, response: str, record: dict[str, Any]) -> float | None:
    """Called once for each response; `record` is the prompt's line of the JSONL file."""
    wanted = record.get("words")
    if not wanted:
        return None  # abstains: the sample is not trained on, and it is not a zero
    said = set(response.lower().split())
    return sum(word in said for word in wanted) / len(wanted)
