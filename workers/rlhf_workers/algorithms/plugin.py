"""An algorithm from outside the project: loads the user's class and checks its results.

Rule: an `Exception` or `SystemExit` of a method, or a result that fails a check, becomes a WorkError that names the
place and the method.
"""

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar, cast

import torch

from rlhf_api.algorithms.plugin import AlgorithmPlugin
from rlhf_common.error_text import error_text
from rlhf_common.json_numbers import finite_number
from rlhf_common.names import ExitCode
from rlhf_workers.algorithms.base import Algorithm, AlgorithmContext
from rlhf_workers.algorithms.objectives import PolicyLosses, PolicyTerms, TokenLosses
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch

FIELD: Final = "spec.algorithm.plugin"
MODULE_NAME: Final = "rlhf_plugin_algorithm"
"""Module name of an imported file."""
MAX_STATE_BYTES: Final = 1024 * 1024
"""Maximum bytes of a plug-in's state as JSON."""
MAX_METRICS: Final = 64
"""Maximum metrics from one call of a plug-in's method."""
MAX_NAME: Final = 100
"""Maximum characters of a metric's name."""
MAX_MESSAGE: Final = 2000

Result = TypeVar("Result")


class PluginAlgorithm(Algorithm):
    """The user's algorithm with checks."""

    def __init__(self, context: AlgorithmContext) -> None:
        fields = cast(AlgorithmPlugin, context.fields)
        super().__init__(replace(context, parameters=fields.parameters))
        self._place = fields.file or cast(str, fields.module)
        self._name = fields.name
        implementation = load_class(fields)
        if implementation.objectives is not Algorithm.objectives:
            raise self._wrong(
                "objectives", "is never called for a plug-in", "define policy_loss and value_loss instead"
            )
        self._user = self._call("__init__", lambda: implementation(self.context))
        self.prepared = self._call("prepared", lambda: tuple(str(name) for name in self._user.prepared))

    def begin_iteration(self, iteration: int) -> None:
        super().begin_iteration(iteration)
        self._call("begin_iteration", lambda: self._user.begin_iteration(iteration))

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        result = self._call("prepare", lambda: self._user.prepare(batch))
        if not isinstance(result, TrainingBatch):
            raise self._wrong("prepare", f"returned a {type(result).__name__}", "return batch.with_fields(...)")
        added = result.fields.keys() - batch.fields.keys()
        if added != set(self.prepared):
            message = (
                f"added the fields {', '.join(sorted(added)) or 'none'}; `prepared` names {', '.join(self.prepared)}"
            )
            raise self._wrong("prepare", message, "name in `prepared` exactly the fields that it adds")
        for name in self.prepared:
            self._check("prepare", f"field {name}", result.fields[name], batch.mask.shape)
        # Take only the requested fields: tokens, masks and scores do not change.
        return batch.with_fields(**{name: result.fields[name].float() * batch.mask for name in self.prepared})

    def shaped_rewards(self, batch: TrainingBatch) -> torch.Tensor:
        rewards = self._call("shaped_rewards", lambda: self._user.shaped_rewards(batch))
        if isinstance(rewards, torch.Tensor) and rewards.shape == batch.valid.shape:
            rewards = rewards.masked_fill(~batch.valid, 0.0)  # those of abstained samples need not be finite
        self._check("shaped_rewards", "the result", rewards, batch.rewards.shape)
        return rewards

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> PolicyLosses:
        losses = self._call("policy_loss", lambda: self._user.policy_loss(log_p, entropy, microbatch))
        if not isinstance(losses, PolicyTerms):
            return self._losses("policy_loss", losses, log_p)
        for clipped in (losses.clipped_low, losses.clipped_high):
            self._losses("policy_loss", (losses.loss, clipped), log_p)
        return losses

    def value_loss(self, values: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        losses = self._call("value_loss", lambda: self._user.value_loss(values, microbatch))
        return self._losses("value_loss", losses, values)

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        weights = self._call("token_weights", lambda: dict(self._user.token_weights(batch, rows)))
        trained = self.context.graph.trained
        if set(weights) != set(trained):
            roles = ", ".join(trained)
            raise self._wrong("token_weights", f"gave weights for {', '.join(map(str, weights))}", f"give {roles}")
        for role, weight in weights.items():
            self._check("token_weights", f"weight of {role}", weight, batch.mask.shape)
        return weights

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        return self._metrics("batch_metrics", self._call("batch_metrics", lambda: self._user.batch_metrics(batch)))

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        own = dict(metrics)
        self._call("finish_iteration", lambda: self._user.finish_iteration(own))
        metrics |= self._metrics("finish_iteration", {name: own[name] for name in own.keys() - metrics.keys()})

    def state(self) -> dict[str, Any]:
        state = self._call("state", self._user.state)
        try:
            size = len(json.dumps(state, allow_nan=False)) if isinstance(state, dict) else -1
        except (TypeError, ValueError, RecursionError) as error:
            raise self._wrong("state", f"is no JSON: {error}", "return numbers, texts, lists and objects") from error
        if not 0 <= size <= MAX_STATE_BYTES:
            problem = f"is {size} bytes of JSON" if size > 0 else f"returned a {type(state).__name__}"
            raise self._wrong("state", problem, f"return a dict of at most {MAX_STATE_BYTES} bytes of JSON")
        return state

    def restore(self, state: dict[str, Any]) -> None:
        self._call("restore", lambda: self._user.restore(state))

    # ------------------------------------------------------------ checks

    def _call(self, method: str, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except WorkError:
            raise
        except NotImplementedError as error:
            raise self._wrong(method, "is not defined", "define it: this job's graph needs it") from error
        except (Exception, SystemExit) as error:
            raise self._wrong(method, described(error, self._place), "correct the code") from error

    def _wrong(self, method: str, problem: str, remedy: str) -> WorkError:
        return failure("name", f"{self._name}.{method} in {self._place}: {problem}; {remedy}")

    def _check(self, method: str, subject: str, value: object, shape: torch.Size) -> None:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape != shape:
            description = (
                f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise self._wrong(method, f"{subject} is {description}", f"give floating numbers {list(shape)}")
        if not bool(torch.isfinite(value.float()).all()):  # float32 is the type that is used
            raise self._wrong(method, f"{subject} holds a number that is not finite", "give finite numbers")

    def _losses(self, method: str, losses: object, like: torch.Tensor) -> TokenLosses:
        if not isinstance(losses, tuple) or len(losses) != 2:
            raise self._wrong(method, f"returned a {type(losses).__name__}", "return (loss per token, clipped or None)")
        loss, clipped = losses
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point() or loss.shape != like.shape:
            description = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self._wrong(method, f"the loss is {description}", f"give one number per token, {list(like.shape)}")
        if like.requires_grad and not loss.requires_grad:
            raise self._wrong(method, "the loss has no gradient", "compute it from the arguments, without detach()")
        if clipped is not None and (not isinstance(clipped, torch.Tensor) or clipped.shape != like.shape):
            raise self._wrong(method, "the second value is not per token", "give a bool tensor like the loss, or None")
        return loss, clipped

    def _metrics(self, method: str, metrics: object) -> dict[str, float]:
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise self._wrong(method, "gave no dict, or too many metrics", f"give at most {MAX_METRICS} by name")
        for name, value in metrics.items():
            if not isinstance(name, str) or finite_number(value) is None or len(name) > MAX_NAME:
                raise self._wrong(
                    method, f"metric {name!r:.200} is {value!r:.200}", "give short names with finite numbers"
                )
        return {name: float(value) for name, value in metrics.items()}


def load_class(fields: AlgorithmPlugin) -> type[Algorithm]:
    """Return the class in a manifest. Raises WorkError if it cannot be loaded or is no algorithm."""
    part, place = ("file", fields.file) if fields.file else ("module", cast(str, fields.module))
    assert place is not None  # one of the two is set
    try:
        loaded = _load_file(Path(place)) if fields.file else importlib.import_module(place)
    except FileNotFoundError as error:
        if not Path(place).exists():
            raise failure(part, f"{place}: there is no such file; mount the volume that holds it") from error
        raise failure(part, f"{place}: {described(error, place)}") from error
    except (Exception, SystemExit) as error:
        raise failure(part, f"{place} cannot be imported: {described(error, place)}") from error
    result = getattr(loaded, fields.name, None)
    if not isinstance(result, type) or not issubclass(result, Algorithm):
        classes = sorted(
            name for name, value in vars(loaded).items()
            if isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm
        )  # fmt: skip
        message = f"{place} has no class {fields.name} derived from {Algorithm.__module__}.Algorithm"
        raise failure("name", f"{message}; it has {', '.join(classes) or 'none'}")
    return result


def failure(part: str, message: str) -> WorkError:
    """Return the failure of a plug-in; `part` is the responsible field of spec.algorithm.plugin."""
    field = f"{FIELD}.{part}"
    return WorkError("BadAlgorithm", f"{field}: {message}"[:MAX_MESSAGE], field=field, exit_code=ExitCode.USER_CODE)


def described(error: BaseException, place: str) -> str:
    """Return `file:line: Type: text` at the innermost line of the user's code, or without a place if there is none.

    `place`: the file or the module.
    """
    text = error_text(error)
    steps = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename) == Path(place)
        or f"{frame.f_globals.get('__name__')}.".startswith(f"{place}.")
    ]
    return f"{steps[-1][0].name}:{steps[-1][1]}: {text}" if steps else text


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    spec.loader.exec_module(module)
    return module
