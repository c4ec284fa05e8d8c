"""What vLLM reads of the environment while it is imported.

Rule: set before the first import of vllm in this process, and inherited by its executor processes. What a promise of
the project hangs on is set whatever a template says; the rest is a default. Must never import vLLM itself.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

PROMISED: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core is this process, which steps it
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner, a default on GPUs, draws in kernels of its own, not by key
    "VLLM_HOST_IP": "127.0.0.1",  # its processes are of one pod, and nothing that they say is authenticated
}
BUILT_WITH: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Networks of vLLM's groups of processes; those that training ranks make in this process are of other pods."""
DEFAULTS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the worker's own thread settings hold; two workers on one core would crawl
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go where the worker's go
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy threads' locks in the middle of their work
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent to anyone
    "DO_NOT_TRACK": "1",
}


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set what is promised, and of the defaults what is not there."""
    environment.update(PROMISED)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


@contextmanager
def within_the_pod(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, groups of processes listen on the loopback alone; their executor processes inherit it."""
    before = {name: environment.get(name) for name in BUILT_WITH}
    environment.update(BUILT_WITH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value
