"""The history of each sample of an iteration: which worker decoded it when, when it ended, when it was scored.

Versioned data for JSON. A moment is in seconds from `began_ns`; an unknown moment is null.
"""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION: Final = 1
MAX_SAMPLES: Final = 8192
"""Most samples of an iteration."""
MAX_PLACES: Final = 64
"""Most changes of place, and most weight versions, of a sample."""
MAX_WORKERS: Final = 10_000

Moment = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=128)]
Place = tuple[Moment, Annotated[int, Field(ge=-1, lt=MAX_WORKERS)]]
Version = tuple[Tokens, Tokens]


class SampleHistories(BaseModel):
    """One iteration; each column about samples has an entry for each sample, by index."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = VERSION
    iteration: Tokens
    """Number of the iteration, from 0."""
    began_ns: Annotated[int, Field(ge=0, lt=2**63)]
    """Begin of the iteration, in nanoseconds since the Unix epoch."""
    workers: Annotated[list[Name], Field(max_length=MAX_WORKERS)]
    """Workers that decoded samples."""
    prompts: Annotated[list[Tokens], Field(max_length=MAX_SAMPLES)]
    """Prompt lengths in tokens."""
    responses: Annotated[list[Tokens], Field(max_length=MAX_SAMPLES)]
    """Response lengths in tokens."""
    places: Annotated[list[Annotated[list[Place], Field(max_length=MAX_PLACES)]], Field(max_length=MAX_SAMPLES)]
    """(moment, index in `workers` of the worker that decodes it from then on; -1 when it was queued again)."""
    finished: Annotated[list[Moment | None], Field(max_length=MAX_SAMPLES)]
    scored: Annotated[list[Moment | None], Field(max_length=MAX_SAMPLES)]
    versions: Annotated[list[Annotated[list[Version], Field(max_length=MAX_PLACES)]], Field(max_length=MAX_SAMPLES)]
    """(weight version, tokens of the response that it sampled), first tokens first."""
    drafted: Annotated[list[Tokens], Field(max_length=MAX_SAMPLES)]
    """Draft tokens verified for the sample."""
    accepted: Annotated[list[Tokens], Field(max_length=MAX_SAMPLES)]
    rewards: Annotated[list[Number | None], Field(max_length=MAX_SAMPLES)]
    left_out: Annotated[dict[Annotated[int, Field(ge=0, lt=MAX_SAMPLES)], Name], Field(max_length=MAX_SAMPLES)]
    """Sample that failed, was dropped or was cut off -> its state."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        columns = (self.responses, self.places, self.finished, self.scored, self.versions, self.drafted, self.accepted)
        if any(len(column) != len(self.prompts) for column in (*columns, self.rewards)):
            raise ValueError("its columns have different lengths")
        if any(worker >= len(self.workers) for places in self.places for _, worker in places):
            raise ValueError("a place names a worker that is not in workers")
        return self
