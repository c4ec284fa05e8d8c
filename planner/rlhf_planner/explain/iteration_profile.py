"""The facts of an iteration that findings are made of: small, bounded, versioned, as plain data for JSON.

Rule: what was measured, never a conclusion. Readers ignore fields they do not know, and refuse another version. All
times are seconds; moments count from the first lease of the iteration. Lists are bounded here, so a file that somebody
else wrote cannot be any size.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = 1
MAX_SAMPLES: Final = 8192
"""Samples whose lengths and moments are recorded, about 40 bytes each; of a larger batch none are."""
MAX_STEPS: Final = 2048
"""Rows of `steps`: some ten per worker, of at least a hundred workers."""

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=128)]
Column = Annotated[list[Seconds], Field(max_length=MAX_SAMPLES)]


class RecordedFacts(BaseModel):
    """A part of the facts; it is never changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SampleFacts(RecordedFacts):
    """Columns [n], in the order of the batch: when each sample was leased, finished and scored, and how long it got."""

    prompts: Column
    """Tokens."""
    responses: Column
    """Tokens."""
    begun: Column
    finished: Column
    scored: Column
    """Empty where not all were scored in this process."""
    workers: Annotated[list[Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=MAX_SAMPLES)]
    """Index of the generation worker that finished each."""


class StepFacts(RecordedFacts):
    """Decode steps of one worker over about as many samples, all together."""

    worker: Name
    steps: Count
    rows: Count
    """Samples per step, mean."""
    keys: Count
    """Of one sample in one step, mean."""
    tokens: Count
    """Of one sample in one step, mean; more than 1 where drafts were accepted."""
    verified: Count
    """Steps among them that verified drafts."""
    seconds: Seconds
    """Of all steps, prefills left out."""


class TaskFacts(RecordedFacts):
    """What one scoring task took."""

    name: Name
    call: bool
    """It calls a reward function, an endpoint or a judge, and is no model of the job's own."""
    last: Count
    """Samples of which it was the last result."""
    busy: Seconds = 0.0
    """Of all its passes, on all workers; 0 for calls."""
    setup: Seconds
    """Of a pass of a model; 0 for calls, which are not observed in passes."""
    per_token: Seconds


class DraftFacts(RecordedFacts):
    """Drafting over all workers: sums of the iteration."""

    steps: Count
    drafted_steps: Count
    samples: Count
    """Of all steps, added up."""
    tokens: Count
    """That were drawn in them."""
    drafted: Count
    """Tokens that were drafted and verified."""
    accepted: Count
    draft_seconds: Seconds
    seconds: Seconds
    """Of all steps."""


class JobSettings(RecordedFacts):
    """The fields that a finding may name, as they were in the iteration."""

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
    """0: the job makes none."""
    evaluation_every: Annotated[int, Field(ge=0, le=10_000_000)]
    """0: it evaluates nothing."""
    tokens_replayed: bool
    """A sample that moves without its cache decodes its tokens again."""


class IterationProfile(RecordedFacts):
    """One iteration."""

    version: Literal[1] = VERSION
    iteration: Annotated[int, Field(ge=0, le=2**53)]
    """From 0."""
    total: Seconds
    """The iteration, the time before the job's first lease left out."""
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
    """Metrics of the ranks that findings read: bubble_share, step_seconds."""
    evaluation_waited: Seconds | None = None
    """Seconds for which it stayed open for an evaluation alone; None: there was none."""
    returned: Count = 0.0
    """Leases that were taken back from lost workers."""

    def seconds(self, *phases: str) -> float:
        """Return the seconds of these phases together."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    @property
    def generation(self) -> float:
        """Return the seconds until the last response was finished."""
        return self.seconds("Generating")

    @property
    def fused(self) -> float:
        """Return the seconds of generation, and of the scoring that remains after it."""
        return self.seconds("Generating", "Scoring")
