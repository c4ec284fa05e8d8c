"""The manifest data of an external algorithm. `rlhf_workers.algorithms.plugin` loads its code."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field

from rlhf_api.algorithms.fields import AlgorithmFields, Epochs, MiniBatchSize
from rlhf_api.algorithms.graph import (
    GENERATE,
    SCORE_REFERENCE,
    SCORE_REWARD,
    SCORE_VALUES,
    TRAIN_ACTOR,
    TRAIN_CRITIC,
    Task,
)
from rlhf_api.api_model import MODULE_PATTERN, NAME_PATTERN, Location
from rlhf_api.rules.common_rules import each_once, multiple
from rlhf_api.rules.paths import is_path
from rlhf_api.rules.rule import Rule, Values

Model = Literal["Reference", "Critic"]
_TASKS_OF: Final[dict[Model, tuple[Task, ...]]] = {
    "Reference": (SCORE_REFERENCE,),
    "Critic": (SCORE_VALUES, TRAIN_CRITIC),
}
"""Model that a plug-in may request -> the tasks for it."""
_OPTIONAL: Final = tuple(task for tasks in _TASKS_OF.values() for task in tasks)


class AlgorithmPlugin(AlgorithmFields):
    """Your own algorithm, a subclass of `rlhf_workers.algorithms.base.Algorithm`; training workers load it."""

    summary: ClassVar = "An algorithm of your own, loaded from a file or module by training workers."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_VALUES, SCORE_REWARD, TRAIN_ACTOR, TRAIN_CRITIC)
    exactly_one: ClassVar = ("file", "module")

    file: Location | None = None
    """Path of a Python file, relative to the manifest. In a cluster, a volume or the image provides it."""
    module: (
        Annotated[
            str,
            Field(
                pattern=MODULE_PATTERN,
                max_length=253,
                examples=["my_algorithms.reinforce"],
            ),
        ]
        | None
    ) = None
    """Importable module of the training image, instead of file."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["Reinforce"])]
    """Name of the class."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=65536, examples=[1])]
    """Responses per prompt; must divide rollout.batchSize."""
    models: Annotated[list[Model], Field(max_length=2)] = Field(default_factory=list)
    """Models besides actor and reward: Reference gives log-probabilities of a frozen policy; Critic gives values and is
    also trained."""
    epochs: Epochs = 1
    """Passes over the samples of a batch."""
    mini_batch_size: MiniBatchSize = 64
    """Samples per optimizer step; must divide rollout.batchSize."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Its own parameters, passed to the class unchanged."""

    @property
    def responses_per_prompt(self) -> int:
        return self.samples_per_prompt

    @property
    def tasks(self) -> tuple[Task, ...]:
        wanted = [task for model in self.models for task in _TASKS_OF[model]]
        return tuple(task for task in self.all_tasks if task not in _OPTIONAL or task in wanted)

    @property
    def files(self) -> Mapping[str, str]:
        return {} if self.file is None else {"file": self.file}

    def resolved(self, absolute: Callable[[str], str]) -> Self:
        return self if self.file is None else self.model_copy(update={"file": absolute(self.file)})

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield is_path(f"{path}.file")
        yield multiple("spec.rollout.batchSize", f"{path}.samplesPerPrompt", of=path)
        yield each_once(f"{path}.models", "must name each model once: remove the second")
        yield _fuses_only_a_critic(path)


def _fuses_only_a_critic(path: str) -> Rule:
    below, mode = path.replace("spec.", "self.", 1), "spec.fusion.intraStage.mode"

    def holds(values: Values) -> bool:
        return not values.has(path) or "Critic" in values[f"{path}.models"] or values[mode] in ("Disabled", "Auto")

    return Rule(
        field=mode,
        node="spec",
        cel=(
            f"!has({below}) || {below}.models.exists(each, each == 'Critic')"
            " || self.fusion.intraStage.mode in ['Disabled', 'Auto']"
        ),
        holds=holds,
        message=f"must be Disabled or Auto unless {path}.models has Critic, as one model alone has nothing to fuse",
    )
