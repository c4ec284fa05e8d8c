"""The document of measured costs: figures that it states, those that it leaves out, and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.plans.plan_jobs import ROUND

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.plan_search.cost_document import CostDocument, CostDocumentError
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource, ModelPart

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


def test_parts_of_a_model_are_profiled_on_their_own() -> None:
    times = [{"tokens": 8, "seconds": 1.0}]
    layers = [{"role": "actor", "part": part, "source": "measured", "times": times} for part in ModelPart]
    figure = {"value": 1e-4, "source": "measured"}
    costs = read({"layers": layers, "stageSeconds": figure, "optimizerSeconds": figure}).applied(ROUND)
    assert [profile.part for profile in costs.layers] == list(ModelPart)
    assert costs.stage_seconds == costs.optimizer_seconds == CostFigure(1e-4, FigureSource.MEASURED)
    again = read({"layers": [{"role": "actor", "source": "measured", "times": [{"tokens": 8, "seconds": 2.0}]}]})
    renewed = {profile.part: profile.points[0][1] for profile in again.applied(costs).layers}
    assert renewed == {ModelPart.LAYER: 2.0, ModelPart.EMBEDDING: 1.0, ModelPart.HEAD: 1.0}


FIGURES = st.fixed_dictionaries(
    {},
    optional={
        name: st.fixed_dictionaries({"value": st.floats(1e-9, 1e15), "source": st.just("measured")})
        for name in ("flops", "memoryBandwidth", "stageSeconds", "startSeconds", "optimizerSeconds")
    },
)
LAYERS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["actor", "critic"]),
            "part": st.sampled_from([str(part) for part in ModelPart]),
            "source": st.just("measured"),
            "times": st.lists(
                st.fixed_dictionaries({"tokens": st.integers(1, 8), "seconds": st.floats(1e-9, 10.0)}), min_size=1
            ),
        }
    ),
    max_size=4,
)
DOCUMENTS = st.builds(lambda figures, layers: read({**figures, "layers": layers}), FIGURES, LAYERS)


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
def test_the_order_in_which_ranks_report_changes_no_figure(
    first: CostDocument, second: CostDocument, third: CostDocument
) -> None:
    ordered, other = (
        a.merged(b).merged(c).applied(ROUND) for a, b, c in ((first, second, third), (third, first, second))
    )
    assert set(ordered.layers) == set(other.layers)
    assert replace(ordered, layers=()) == replace(other, layers=())
    for document in (first, second, third):
        stated = document.applied(ROUND)
        assert ordered.flops.value >= stated.flops.value or stated.flops == ROUND.flops
    assert CostDocument.read(first.text()).applied(ROUND) == first.applied(ROUND)


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
