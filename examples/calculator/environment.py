"""A calculator that the policy calls in turns: it answers `37*84` with `:3108;`. A turn without `*` ends the
response."""

import re
from typing import Any

QUESTION = re.compile(r"(\d{1,4})\*(\d{1,4})")


class Calculator:
    """Environment of one response."""

    def reset(self, record: dict[str, Any]) -> None:
        """Start a response; `record` is the prompt's JSON object."""
        self.right, self.questions = record["answer"], 0

    def step(self, response: str) -> dict[str, Any]:
        """Answer a turn with `*`, with reward 0; any other turn ends the response."""
        if "*" not in response:
            return {"done": True, "reward": float(response == self.right), "metrics": {"questions": self.questions}}
        self.questions += 1
        found = QUESTION.fullmatch(response)
        product = f"{int(found[1]) * int(found[2]):04d}" if found else "?"
        return {"message": f":{product};", "reward": 0.0}
