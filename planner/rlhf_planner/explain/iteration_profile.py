"""The facts of an iteration that findings are based on: versioned, plain data for JSON.

Times are seconds; moments count from the first lease of the iteration. Lists are bounded, because a file may be
foreign.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = 1
MAX_SAMPLES: Final = 8192
"""Largest batch whose lengths and moments are recorded. Larger batches record none."""
MAX_STEPS: Final = 2048
"""Maximum number of rows of `steps`."""

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=128)]
Column = Annotated[list[Seconds], Field(max_length=MAX_SAMPLES)]


class RecordedFacts(BaseModel):
    """An immutable part of the facts."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SampleFacts(RecordedFacts):
    """Columns [n] in the order of the batch: when each sample was first leased, finished and scored, its lengths and
    its worker."""

    prompts: Column
    """Prompt tokens."""
    responses: Column
    """Response tokens."""
    begun: Column
    finished: Column
    scored: Column
    """Moments of the last score; empty unless all samples were scored in this process."""
    workers: Annotated[list[Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=MAX_SAMPLES)]
    """Index of the generation worker that finished each sample."""


class StepFacts(RecordedFacts):
    """Decode steps of one worker over batches of about the same size: sums and means."""

    worker: Name
    steps: Count
    rows: Count
    """Mean samples per step."""
    keys: Count
    """Mean keys per sample and step."""
    tokens: Count
    """Mean tokens per sample and step; more than 1 if drafts were accepted."""
    verified: Count
    """Number of these steps that verified drafts."""
    seconds: Seconds
    """Seconds of all steps, without prefills."""


class TaskFacts(RecordedFacts):
    """Measurements of one scoring task."""

    name: Name
    call: bool
    """Whether the task calls a reward function, an endpoint or a judge instead of one of the job's own models."""
    last: Count
    """Samples for which this task's result came last."""
    busy: Seconds = 0.0
    """Seconds of all passes on all workers; 0 for calls."""
    setup: Seconds
    """Seconds of setup per pass of a model; 0 for calls, which have no observed passes."""
    per_token: Seconds


class DraftFacts(RecordedFacts):
    """Drafting over all workers, summed over the iteration."""

    steps: Count
    drafted_steps: Count
    samples: Count
    """Samples, summed over all steps."""
    tokens: Count
    """Tokens generated in the steps."""
    drafted: Count
    """Tokens drafted and verified."""
    accepted: Count
    draft_seconds: Seconds
    seconds: Seconds
    """Seconds of all steps."""


class JobSettings(RecordedFacts):
    """Settings of the job in the iteration."""

    generation_workers: Annotated[int, Field(ge=0, le=1_000_000)]
    inference_workers: Annotated[int, Field(ge=0, le=1_000_000)]
    max_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    inter_stage: Name
    balance: Name
    overlap: Name
    speculation: Name
    intra_stage: Name
    weight_sharing: Name
    pipeline: Annotated[int, Field(ge=1, le=1_000_000)]
    checkpoint_every: Annotated[int, Field(ge=0, le=10_000_000)]
    """Iterations between checkpoints; 0 if the job makes none."""
    evaluation_every: Annotated[int, Field(ge=0, le=10_000_000)]
    """Iterations between evaluations; 0 if the job makes none."""
    tokens_replayed: bool
    """Whether a sample that moves without its cache decodes its tokens again."""


class IterationProfile(RecordedFacts):
    """Recorded facts of one iteration."""

    version: Literal[1] = VERSION
    iteration: Annotated[int, Field(ge=0, le=2**53)]
    """Number of the iteration, from 0."""
    total: Seconds
    """Seconds of the iteration, without its phase Starting."""
    phases: Annotated[dict[Name, Seconds], Field(max_length=32)]
    """Phase -> seconds."""
    settings: JobSettings
    samples: SampleFacts | None = None
    steps: Annotated[list[StepFacts], Field(max_length=MAX_STEPS)] = Field(default_factory=list)
    tasks: Annotated[list[TaskFacts], Field(max_length=64)] = Field(default_factory=list)
    drafts: DraftFacts | None = None
    training: Annotated[dict[Name, Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Metrics of the ranks; findings read bubble_share."""
    evaluation_waited: Seconds | None = None
    """Seconds of waiting only for the evaluation that is recorded with the iteration; None without one."""
    returned: Count = 0.0
    """Decode leases after which the sample was queued again."""

    def seconds(self, *phases: str) -> float:
        """Return the total seconds of these phases."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    @property
    def generation(self) -> float:
        """Return the seconds of generation."""
        return self.seconds("Generating")

    @property
    def fused(self) -> float:
        """Return the seconds of generation and of the remaining scoring."""
        return self.seconds("Generating", "Scoring")
