"""The verifiable reward of the long-answers example: the share of sums that are right before the first wrong one."""

from typing import Any

GOAL = 200


def score(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Return the share of right sums; 1 when every sum of `137+9=` -> `146;146+9=155;...` up to the first of 200 is
    right."""
    total, step = map(int, record["prompt"].rstrip("=").split("+"))
    wanted = list(range(total + step, GOAL + step, step))
    said = [part[-3:] for part in response.split(";")[:-1]]
    right = 0
    while right < min(len(said), len(wanted)) and said[right] == f"{wanted[right]:03d}":
        right += 1
    return right / max(len(wanted), len(said))
