"""The dataflow graphs that coordinator, planner and manifests read."""

import pytest
from tests.support.manifest_cases import changed

from rlhf_api.algorithms import ALGORITHMS, full_graph, graph_of, samples_per_prompt
from rlhf_api.job import RLHFJobSpec
from rlhf_api.manifest import parse
from rlhf_api.names import Group


def spec(example: str, **put: object) -> RLHFJobSpec:
    return parse(changed(example, dict(put), [])).spec


def test_ppo_scores_by_three_models_and_trains_two() -> None:
    graph = graph_of(spec("ppo"))
    assert graph.trained == ("actor", "critic")
    assert graph.roles == {"actor", "critic", "reference", "reward"}
    assert graph.scored_fields == ("reference_log_probabilities", "values", "reward")


def test_grpo_has_no_critic() -> None:
    graph = graph_of(spec("grpo"))
    assert graph.trained == ("actor",)
    assert "critic" not in graph.roles
    assert samples_per_prompt(spec("grpo")) == 8
    assert samples_per_prompt(spec("ppo")) == 1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_no_kl_term_needs_no_reference(algorithm: str) -> None:
    graph = graph_of(spec(algorithm, **{f"spec.algorithm.{algorithm}.klCoefficient": 0}))
    assert "reference" not in graph.roles
    assert "reference_log_probabilities" not in graph.scored_fields


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_need_is_produced_by_an_earlier_task(algorithm: str) -> None:
    made: set[str] = set()
    for task in full_graph(algorithm).tasks:
        assert set(task.needs) <= made, task
        made |= set(task.produces)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tasks_run_in_stage_order_with_unique_names(algorithm: str) -> None:
    tasks = full_graph(algorithm).tasks
    stages = [Group.GENERATION, Group.INFERENCE, Group.TRAINING]
    assert [stages.index(task.group) for task in tasks] == sorted(stages.index(task.group) for task in tasks)
    assert len({task.name for task in tasks}) == len(tasks)
