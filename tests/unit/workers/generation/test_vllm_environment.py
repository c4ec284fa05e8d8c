"""Environment variables for vLLM: guarantees always, defaults if unset, network settings during construction."""

from rlhf_workers.generation.vllm_engine.environment import BUILT_WITH, DEFAULTS, PROMISED, prepare, within_the_pod


def test_a_template_changes_defaults_and_no_promise() -> None:
    environment = dict.fromkeys((*PROMISED, "VLLM_CPU_OMP_THREADS_BIND"), "a user's")
    prepare(environment)
    assert environment == {**DEFAULTS, **PROMISED, "VLLM_CPU_OMP_THREADS_BIND": "a user's"}


def test_networks_of_training_are_what_they_were_before() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    with within_the_pod(environment):  # as vLLM is built
        assert environment == BUILT_WITH
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1"}
