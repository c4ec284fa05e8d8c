"""Reads PromQL as a server would, against the catalogue: the series it selects, and the labels and unit of its result.

Rule: an unknown form of expression is an error and never passes; support for it is added here. Dimensions are powers of
base units, so `rate` of bytes is bytes per second, and a ratio has no unit.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import promql_parser as promql

from rlhf_common.metrics.metric import Metric, MetricKind, Unit
from rlhf_observability.promql import labels_of

VARIABLES: Final = {"$__rate_interval": "2m", "$__range": "1h", "$__interval": "30s"}
"""Grafana's variables -> a duration, for a reader that knows only durations."""
OVER_TIME: Final = ("rate", "increase", "irate")
PER_SECOND: Final = ("rate", "irate", "deriv")

Dimension = tuple[tuple[str, int], ...]
"""(base unit, power), sorted; empty for a plain number, such as a ratio or a count of series."""
DIMENSIONS: Final[Mapping[Unit, Mapping[str, int]]] = {
    Unit.SECONDS: {"s": 1},
    Unit.TIMESTAMP: {"s": 1},
    Unit.BYTES: {"bytes": 1},
    Unit.TOKENS: {"tokens": 1},
    Unit.TOKENS_PER_SECOND: {"tokens": 1, "s": -1},
    Unit.SAMPLES: {"samples": 1},
    Unit.SAMPLES_PER_SECOND: {"samples": 1, "s": -1},
    Unit.RATIO: {},
    Unit.NATS: {"nats": 1},
    Unit.REWARD: {"reward": 1},
    Unit.STATE: {},
    Unit.NUMBER: {},
}


@dataclass(frozen=True)
class Selected:
    """One selector of an expression."""

    name: str
    metric: Metric
    matchers: Mapping[str, str]
    function: str
    """Function that receives the range, such as `rate`; empty for a value."""


@dataclass(frozen=True)
class Reading:
    """The result of an expression."""

    labels: frozenset[str]
    dimension: Dimension


class Reader:
    """Reads expressions against metrics by the names of their series."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {name: metric for metric in metrics.values() for name in metric.sample_names}

    def parse(self, expression: str) -> Any:
        """Return the syntax tree. Raises ValueError with the parser's message."""
        for variable, duration in VARIABLES.items():
            expression = expression.replace(variable, duration)
        return promql.parse(expression)

    def selected(self, expression: str) -> list[Selected]:
        """Return all selectors of an expression."""
        return list(self._selected(self.parse(expression), ""))

    def read(self, expression: str) -> Reading:
        """Return the labels and the dimension of an expression's result."""
        return self._read(self.parse(expression))

    def _metric(self, name: str | None) -> Metric:
        if name is None or name not in self._metrics:
            raise ValueError(f"no process serves {name}")
        return self._metrics[name]

    def _selected(self, node: Any, function: str) -> Iterator[Selected]:
        match node:
            case promql.VectorSelector():
                matchers = {matcher.name: matcher.value for matcher in node.matchers.matchers}
                yield Selected(str(node.name), self._metric(node.name), matchers, function)
            case promql.MatrixSelector():
                yield from self._selected(node.vector_selector, function)
            case promql.Call():
                for argument in node.args:
                    yield from self._selected(argument, node.func.name)
            case promql.BinaryExpr():
                yield from self._selected(node.lhs, function)
                yield from self._selected(node.rhs, function)
            case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                yield from self._selected(node.expr, function)

    # ---------------------------------------------------------------- labels and dimensions

    def _read(self, node: Any) -> Reading:
        match node:
            case promql.NumberLiteral():
                return Reading(frozenset(), ())
            case promql.VectorSelector():
                metric = self._metric(node.name)
                count = metric.kind is MetricKind.HISTOGRAM and not str(node.name).endswith("_sum")
                le = frozenset() if str(node.name).endswith("_bucket") else frozenset(("le",))
                return Reading(labels_of(metric) - le, () if count else _dimension(DIMENSIONS[metric.unit]))
            case promql.MatrixSelector():
                return self._read(node.vector_selector)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self._read(node.expr)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.Call():
                return self._called(node)
            case promql.BinaryExpr():
                return self._combined(node)
        raise ValueError(f"{type(node).__name__} is not read here yet")

    def _aggregated(self, node: Any) -> Reading:
        inner, operation = self._read(node.expr), str(node.op)
        dimension = () if operation in ("count", "group") else inner.dimension
        if node.modifier is None:
            return Reading(inner.labels if operation in ("topk", "bottomk") else frozenset(), dimension)
        if node.modifier.type != promql.AggModifierType.By:
            raise ValueError(f"{operation} without: name the labels that stay, since a scrape adds others")
        labels = frozenset(node.modifier.labels)
        if not labels <= inner.labels:
            raise ValueError(f"{operation} by {sorted(labels - inner.labels)}, which its series have not")
        return Reading(labels, dimension)

    def _called(self, node: Any) -> Reading:
        name = node.func.name
        if name == "time":
            return Reading(frozenset(), (("s", 1),))
        if name == "vector":
            return self._read(node.args[0])
        if name == "histogram_quantile":
            return self._quantile(node)
        if name == "label_replace":
            inner = self._read(node.args[0])
            return Reading(inner.labels | {node.args[1].val}, inner.dimension)
        inner = self._read(node.args[0])
        if name in PER_SECOND:
            return Reading(inner.labels, _dimension(Counter(dict(inner.dimension)), {"s": -1}))
        if name in ("changes", "resets", "absent"):
            return Reading(inner.labels, ())
        if name == "timestamp":
            return Reading(inner.labels, (("s", 1),))
        if name == "scalar":
            return Reading(frozenset(), inner.dimension)
        if name in ("increase", "delta", "abs", "clamp_min", "clamp_max", "sort_desc") or name.endswith("_over_time"):
            return inner
        raise ValueError(f"{name}() is not read here yet")

    def _quantile(self, node: Any) -> Reading:
        [selected] = self._selected(node.args[1], "")
        inner = self._read(node.args[1])
        if "le" not in inner.labels or selected.metric.kind is not MetricKind.HISTOGRAM:
            raise ValueError("histogram_quantile needs the label le of a histogram")
        return Reading(inner.labels - {"le"}, _dimension(DIMENSIONS[selected.metric.unit]))

    def _combined(self, node: Any) -> Reading:
        left, right, operation = self._read(node.lhs), self._read(node.rhs), str(node.op)
        labels = _labels(node, left.labels, right.labels)
        if operation in ("*", "/"):
            sign = 1 if operation == "*" else -1
            powers = {unit: sign * power for unit, power in right.dimension}
            return Reading(labels, _dimension(Counter(dict(left.dimension)), powers))
        numbers = isinstance(node.lhs, promql.NumberLiteral) or isinstance(node.rhs, promql.NumberLiteral)
        zero = isinstance(node.rhs, promql.Call) and node.rhs.func.name in ("vector", "label_replace")
        if left.dimension != right.dimension and not numbers and not zero and operation not in ("and", "unless"):
            raise ValueError(f"{operation} of {left.dimension} and {right.dimension}")
        return Reading(labels, left.dimension if not isinstance(node.lhs, promql.NumberLiteral) else right.dimension)


def _labels(node: Any, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    """Return the labels of the result of two sides."""
    modifier, scalars = node.modifier, (promql.NumberLiteral,)
    if isinstance(node.lhs, scalars) or _is_number(node.lhs):
        return right
    if isinstance(node.rhs, scalars) or _is_number(node.rhs) or str(node.op) in ("and", "or", "unless"):
        return left
    matching = None if modifier is None else modifier.matching
    if matching is None:
        if left != right:
            raise ValueError(f"{node.op}: the sides differ in {sorted(left ^ right)}: say on (...)")
        return left
    if matching.type != promql.LabelModifierType.Include:
        raise ValueError(f"{node.op} ignoring: name the labels that match, since a scrape adds others")
    joined = frozenset(matching.labels)
    if not joined <= left & right:
        raise ValueError(f"{node.op} on {sorted(joined - (left & right))}, which not both sides have")
    if modifier.card == promql.VectorMatchCardinality.ManyToOne:
        return left | frozenset(modifier.group_labels or ())
    if modifier.card == promql.VectorMatchCardinality.OneToMany:
        return right | frozenset(modifier.group_labels or ())
    return joined


def _is_number(node: Any) -> bool:
    while isinstance(node, promql.ParenExpr):
        node = node.expr
    return isinstance(node, promql.Call) and node.func.name in ("scalar", "time")


def _dimension(*powers: Mapping[str, int]) -> Dimension:
    """Return the product of powers of units."""
    total: Counter[str] = Counter()
    for each in powers:
        for unit, power in each.items():
            total[unit] += power
    return tuple(sorted((unit, power) for unit, power in total.items() if power))
