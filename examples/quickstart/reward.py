"""The quickstart's verifiable reward: 1 when the sum at the end of the response is right, else 0."""

from typing import Any


def score(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Compare the text after the last `=` with the right sum: `3+5+2=` is answered by `08+2=10`."""
    return float(response.rsplit("=", 1)[-1] == record["answer"])
