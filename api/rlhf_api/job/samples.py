"""`spec.samples`: tables of samples that the coordinator writes for people to read."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel


class SampleSelection(ApiModel):
    """Tables of samples in the run folder: prompts, responses, rewards, advantages, and their origin."""

    mode: Literal["Enabled", "Disabled"] = "Enabled"
    """Enabled writes a table of some samples of some iterations. Disabled writes none."""
    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between tables. The first and the last iteration also have one."""
    per_iteration: Annotated[int, Field(ge=0, le=1048576)] = 16
    """Samples per table, spread evenly over the batch; 0 takes all."""

    def due(self, iteration: int, iterations: int) -> bool:
        """Return whether an iteration, counted from 0, has a table in a job of `iterations` iterations."""
        return self.mode == "Enabled" and (iteration % self.every == 0 or iteration + 1 >= iterations)

    def chosen(self, batch_size: int) -> list[int]:
        """Return the indices of the batch's samples in its table, in order."""
        count = min(self.per_iteration or batch_size, batch_size)
        return [place * batch_size // count for place in range(count)]
