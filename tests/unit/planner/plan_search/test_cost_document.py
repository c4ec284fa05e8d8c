"""The document of measured costs: figures that it states, those that it leaves out, and what it refuses."""

import json
from typing import Any

import pytest
from tests.support.plans.plan_jobs import ROUND

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.plan_search.cost_document import CostDocument, CostDocumentError
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource

STAGE = StageCosts(DecodeLines((1,), (0.5,), (0.0,)), 8)
LINK = {"bandwidth": {"value": 5e8, "source": "measured"}, "latency": {"value": 0, "source": "assumed"}}


def read(document: Any) -> CostDocument:
    return CostDocument.read(json.dumps(document))


def test_stated_figures_replace_assumed_ones() -> None:
    layers = [
        {"role": "actor", "source": "measured", "times": [{"tokens": 64, "seconds": 2.0}, {"tokens": 8, "seconds": 1}]}
    ]
    engine = {"costs": STAGE.document(), "tensor": 2, "source": "learned"}
    document = {"device": "mine", "flops": {"value": 2e10, "source": "measured"}, "inside": LINK}
    costs = read({**document, "layers": layers, "engine": engine}).applied(ROUND)
    assert costs.device_name == "mine"
    assert costs.flops == CostFigure(2e10, FigureSource.MEASURED)
    assert (costs.inside.bandwidth.value, costs.inside.latency.value) == (5e8, 0)
    assert costs.inside.source is FigureSource.ASSUMED, "as weak as its latency"
    assert costs.layers[0].points == ((8.0, 1.0), (64.0, 2.0))
    assert costs.engine is not None
    assert (costs.engine.tensor, costs.engine.costs, costs.engine.source) == (2, STAGE, FigureSource.LEARNED)
    assert costs.memory_bandwidth == ROUND.memory_bandwidth
    assert costs.between == ROUND.between


def test_an_empty_document_changes_nothing() -> None:
    assert read({}).applied(ROUND) == ROUND


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "the document = '[]': Input should be an object"),
        ({"flop": {"value": 1, "source": "measured"}}, "flop = "),
        ({"flop": 1}, "flop = '1': unknown field; docs/plan-search.md lists the fields"),
        ({"flops": 3}, "flops = '3': Input should be an object"),
        ({"flops": {"value": 3}}, "flops.source: Field required"),
        ({"flops": {"value": -3, "source": "measured"}}, "flops.value = '-3': Input should be greater than 0"),
        ({"flops": {"value": "3", "source": "measured"}}, "flops.value = '3': Input should be a valid number"),
        (
            {"flops": {"value": 3, "source": "guessed"}},
            "flops.source = 'guessed': Input should be 'measured', 'learned",
        ),
        ({"inside": {"bandwidth": {"value": 1, "source": "measured"}}}, "inside.latency: Field required"),
        ({"layers": [{"role": "actor", "source": "measured", "times": []}]}, "layers.0.times = '[]': List should have"),
        (
            {"layers": [{"role": "a", "source": "measured", "times": [{"tokens": 0, "seconds": 1}]}]},
            "layers.0.times.0.tokens = '0': Input should be greater than or equal to 1",
        ),
    ],
)
def test_an_invalid_field_is_named_with_its_value(document: Any, words: str) -> None:
    with pytest.raises(CostDocumentError) as refused:
        read(document)
    assert words in str(refused.value)


def test_texts_that_state_no_costs_are_refused() -> None:
    with pytest.raises(CostDocumentError, match="Invalid JSON"):
        CostDocument.read("{")
    document = read({"engine": {"costs": {"decode": 3}, "source": "learned"}})
    with pytest.raises(CostDocumentError, match=r"engine\.costs: .*journal/job\.json"):
        document.applied(ROUND)
