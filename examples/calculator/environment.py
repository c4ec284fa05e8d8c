"""A calculator that a policy asks in turns: `37*84` is answered by `:3108;`, and any other turn ends the response."""

import re
from typing import Any

QUESTION = re.compile(r"(\d{1,4})\*(\d{1,4})")


class Calculator:
    """One for each response."""

    def reset(self, record: dict[str, Any]) -> None:
        """`record` is the prompt's JSON object."""
        self.right, self.questions = record["answer"], 0

    def step(self, response: str) -> dict[str, Any]:
        """`response` is a turn of the policy: a question is worth nothing by itself, an answer ends the response."""
        if "*" not in response:
            return {"done": True, "reward": float(response == self.right), "metrics": {"questions": self.questions}}
        self.questions += 1
        found = QUESTION.fullmatch(response)
        product = f"{int(found[1]) * int(found[2]):04d}" if found else "?"
        return {"message": f":{product};", "reward": 0.0}
