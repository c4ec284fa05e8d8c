"""Environment variables that vLLM reads while it is imported.

Rule: they are set before the first import of vllm in this process. Must never import vLLM itself.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

PROMISED: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process runs the core and steps it
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner, a default on GPUs, draws in its own kernels, not by key
    "VLLM_HOST_IP": "127.0.0.1",  # its processes belong to one pod, and their messages are not authenticated
}
BUILT_WITH: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Network interfaces of vLLM's process groups, which do not leave the pod."""
DEFAULTS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # keeps the worker's thread settings; sharing a core would be slow
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go to the worker's log
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy locks that threads hold
    "VLLM_NO_USAGE_STATS": "1",  # sends no usage data
    "DO_NOT_TRACK": "1",
}


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the required variables, and missing defaults."""
    environment.update(PROMISED)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


@contextmanager
def within_the_pod(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Let process groups that are created inside use the loopback; executor processes started inside inherit that."""
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
