"""Kinds of rules that occur more than once: CEL, Python check and message are built from the same fields."""

import math
from collections.abc import Sequence
from typing import Final

from rlhf_api.rules.rule import Rule, Values

MIN_TEMPERATURE: Final = 0.001
"""Lowest temperature of random sampling."""
AXES: Final = ("pipeline", "data", "context", "tensor")
"""Axes of the training ranks; their product is the number of ranks."""
COPIES: Final = ("data", "context")
"""Axes along which all ranks have the same layers."""


def _cel(path: str) -> str:
    return path.replace("spec.", "self.", 1)


def multiple(field: str, *factors: str, of: str | None = None) -> Rule:
    """Return the rule that `field` is a multiple of the product of `factors`, if the parent `of` is set."""
    product_cel = " * ".join(_cel(factor) for factor in factors)
    names = " x ".join(factors)
    value_cel = _cel(field)
    guard = f"!has({_cel(of)}) || " if of else ""

    def product(values: Values) -> int:
        result = 1
        for factor in factors:
            result *= values[factor]
        return result

    def says(values: Values) -> str:
        value, unit = values[field], product(values)
        return f"must be a multiple of {names} ({unit}): use {value // unit * unit + unit}"

    # Each expression of value and unit is written once, in a list of one pair, to keep the definition small. format is
    # called because the API server cannot bound the cost of string concatenation.
    words = f"'must be a multiple of {names} (%d): use %d'.format([n[1], n[0] - n[0] % n[1] + n[1]])"
    return Rule(
        field=field,
        node="spec",
        # The factor's own field rejects a value below 1; here it would only add a division by zero to the answer.
        cel=f"{guard}[{product_cel}].all(n, n < 1 || {value_cel} % n == 0)",
        holds=lambda values: (of is not None and not values.has(of)) or values[field] % product(values) == 0,
        message=f"must be a multiple of {names}",
        message_cel=f"[[{value_cel}, {product_cel}]].map(n, {words})[0]",
        says=says,
    )


def greedy_or_random(field: str, node: str) -> Rule:
    """Return the rule that a temperature in the object `node` is 0, or large enough as a divisor of logits."""
    value = f"self{field.removeprefix(node)}"
    return Rule(
        field=field,
        node=node,
        cel=f"{value} == 0.0 || {value} >= {MIN_TEMPERATURE}",
        holds=lambda values: not values.has(node) or values[field] == 0 or values[field] >= MIN_TEMPERATURE,
        message=f"must be 0, which is greedy, or at least {MIN_TEMPERATURE}: logits divided by less overflow",
    )


def ranks_in_words(axes: Sequence[str] = AXES) -> str:
    """Return the number of ranks along some axes as text."""
    return " x ".join(axes)


def ranks_in_cel(parallelism: str, axes: Sequence[str] = AXES) -> str:
    """Return the number of ranks along some axes in CEL; `parallelism` is the CEL expression of the parallelism."""
    return " * ".join(f"{parallelism}.{axis}" for axis in axes)


def number_of_ranks(values: Values, axes: Sequence[str] = AXES) -> int:
    """Return the number of ranks along some axes."""
    return math.prod(values[f"spec.training.parallelism.{axis}"] for axis in axes)


def nothing_to_fuse(algorithm: str) -> Rule:
    """Return the rule that an algorithm with a single trained model has no intra-stage fusion."""
    return Rule(
        field="spec.fusion.intraStage.mode",
        node="spec",
        cel=f"!has(self.algorithm.{algorithm}) || self.fusion.intraStage.mode in ['Disabled', 'Auto']",
        holds=lambda values: (
            not values.has(f"spec.algorithm.{algorithm}")
            or values["spec.fusion.intraStage.mode"] in ("Disabled", "Auto")
        ),
        message=f"must be Disabled or Auto with algorithm {algorithm}, which trains one model",
    )


def each_once(field: str, message: str) -> Rule:
    """Return the rule that a list has no duplicates."""
    node, _, name = field.rpartition(".")
    return Rule(
        field=field,
        node=node,
        cel=f"self.{name}.all(each, self.{name}.exists_one(other, other == each))",
        holds=lambda values: len(set(values[field])) == len(values[field]),
        message=message,
    )


def drawn_at_random(algorithm: str, why: str) -> Rule:
    """Return the rule that an algorithm does not sample greedily; `why`: what would otherwise be identical."""
    field = "spec.rollout.temperature"
    return Rule(
        field=field,
        node="spec",
        cel=f"!has({_cel(algorithm)}) || self.rollout.temperature > 0.0",
        holds=lambda values: not values.has(algorithm) or values[field] > 0,
        message=f"must be above 0 with algorithm {algorithm.rpartition('.')[2]}, or {why} are the same: use 1.0",
    )


def estimator_fits(algorithm: str) -> Rule:
    """Return the rule that the KL estimator of an algorithm is not Unbiased if the KL term is in the reward."""
    field, place = f"{algorithm}.klEstimator", f"{algorithm}.klIn"
    return Rule(
        field=field,
        node="spec",
        cel=(
            f"!has({_cel(algorithm)}) || !has({_cel(field)}) || {_cel(field)} != 'Unbiased' || {_cel(place)} == 'Loss'"
        ),
        holds=lambda values: not values.has(field) or values[field] != "Unbiased" or values[place] == "Loss",
        message=f"must be K1, K2 or K3 with {place} Reward, where no ratio weights the penalty: use K3, or klIn Loss",
    )
