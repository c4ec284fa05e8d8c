"""The dataflow graphs that coordinator, planner and manifests read."""

import pytest
from tests.support.algorithms import SMALL
from tests.support.manifests.manifest_cases import changed

from rlhf_api.algorithms import ALGORITHMS, Graph, Scope, full_graph, graph_of, samples_per_prompt
from rlhf_api.algorithms.fields import AlgorithmFields
from rlhf_api.job import RLHFJobSpec
from rlhf_api.manifest import parse
from rlhf_common.names import Group


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
    graph = full_graph(algorithm)
    produced: set[str] = set() if graph.generates else {"tokens"}  # of responses that the prompt file holds
    for task in graph.tasks:
        assert set(task.needs) <= produced, task
        produced |= set(task.produces)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tasks_run_in_stage_order_with_unique_names(algorithm: str) -> None:
    tasks = full_graph(algorithm).tasks
    stages = [Group.GENERATION, Group.INFERENCE, Group.TRAINING]
    assert [stages.index(task.group) for task in tasks] == sorted(stages.index(task.group) for task in tasks)
    assert len({task.name for task in tasks}) == len(tasks)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_says_its_passes_mini_batches_and_responses_per_prompt(algorithm: str) -> None:
    fields = ALGORITHMS[algorithm].model_validate(SMALL[algorithm])
    assert {"epochs", "mini_batch_size"} <= ALGORITHMS[algorithm].model_fields.keys()
    assert fields.responses_per_prompt >= 1
    assert set(fields.tasks) <= set(ALGORITHMS[algorithm].all_tasks)
    graph = Graph(algorithm, fields.tasks)
    assert graph.reward_fields or fields.response_keys
    assert bool(fields.response_keys) != graph.generates


def test_an_algorithm_that_does_not_say_its_responses_per_prompt_cannot_be_made() -> None:
    class Forgetful(AlgorithmFields):
        """An object without attributes."""

    with pytest.raises(TypeError, match="responses_per_prompt"):
        Forgetful()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("models", "trained", "scored"),
    [
        ([], ["actor"], ["reward"]),
        (["Reference"], ["actor"], ["reference_log_probabilities", "reward"]),
        (["Critic"], ["actor", "critic"], ["values", "reward"]),
    ],
)
def test_a_plugin_has_the_tasks_of_the_models_that_it_names(
    models: list[str], trained: list[str], scored: list[str]
) -> None:
    fields = ALGORITHMS["plugin"].model_validate({**SMALL["plugin"], "models": models})
    graph = Graph("plugin", fields.tasks)
    assert (list(graph.trained), list(graph.scored_fields)) == (trained, scored)


def test_tasks_wait_for_their_scope_and_fields_have_their_shape() -> None:
    tasks = full_graph("ppo").tasks
    assert {task.scope for task in tasks if task.group is Group.TRAINING} == {Scope.BATCH}
    assert {task.scope for task in tasks if task.group is not Group.TRAINING} == {Scope.SAMPLE}
    assert {field: field.numbers(7) for field in full_graph("ppo").scored_fields} == {
        "reference_log_probabilities": 7,
        "values": 7,
        "reward": 1,
    }
    assert [task.name for task in tasks if task.incremental and task.group is Group.INFERENCE] == [
        "reference",
        "values",
    ]
