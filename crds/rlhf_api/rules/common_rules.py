"""Kinds of rules that occur more than once: CEL, Python check and words are made together from the same fields."""

from rlhf_api.rules.rule import Rule, Values


def _cel(path: str) -> str:
    return path.replace("spec.", "self.", 1)


def multiple(field: str, *factors: str, of: str | None = None) -> Rule:
    """Return the rule that `field` is a multiple of the product of `factors`, where the parent `of` is set."""
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
        below = value // unit * unit
        choice = f"{below} or {below + unit}" if below else f"{unit}"
        return f"must be a multiple of {names} ({unit}): use {choice}"

    unit = f"({product_cel})"
    below = f"{value_cel} / {unit} * {unit}"
    # One call of format each: the API server cannot bound the cost of strings that are added up.
    nearest = f"'must be a multiple of {names} (%d): use %d or %d'.format([{unit}, {below}, {below} + {unit}])"
    smallest = f"'must be a multiple of {names} (%d): use %d'.format([{unit}, {unit}])"
    return Rule(
        field=field,
        node="spec",
        # A factor below 1 is refused by its own field; here it would only add a division by zero to the answer.
        cel=f"{guard}{unit} < 1 || {value_cel} % {unit} == 0",
        holds=lambda values: (of is not None and not values.has(of)) or values[field] % product(values) == 0,
        message=f"must be a multiple of {names}",
        message_cel=f"{below} > 0 ? {nearest} : {smallest}",
        says=says,
    )


def nothing_to_fuse(algorithm: str) -> Rule:
    """Return the rule that an algorithm which trains a single model has no intra-stage fusion."""
    return Rule(
        field="spec.fusion.intraStage.mode",
        node="spec",
        cel=f"!has(self.algorithm.{algorithm}) || self.fusion.intraStage.mode in ['Disabled', 'Auto']",
        holds=lambda values: (
            not values.has(f"spec.algorithm.{algorithm}")
            or values["spec.fusion.intraStage.mode"] in ("Disabled", "Auto")
        ),
        message=f"must be Disabled or Auto with algorithm {algorithm}, which trains one model and has nothing to fuse",
    )


def replicas(group: str) -> Rule:
    """Return the rule that a group has a worker unless the job is suspended."""
    field = f"spec.{group}.replicas"
    return Rule(
        field=field,
        node="spec",
        cel=f"self.suspend || self.{group}.replicas >= 1",
        holds=lambda values: values["spec.suspend"] or values[field] >= 1,
        message="must be at least 1 in a job that is not suspended: use 1, or pause the job with spec.suspend: true",
    )
