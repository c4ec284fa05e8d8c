"""Drives vLLM's engine core in this process, one step at a time.

Rule: the core owns its samples until it reports their end or they are aborted; drawn tokens are returned once. vLLM's
processes for input, output and text are not used. Must be driven by one thread.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import time
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import torch

from rlhf_workers.generation.vllm_engine import environment

environment.prepare(os.environ)  # before vLLM is imported

import vllm  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig, VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.cpu_resource_utils import get_memory_node_info  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402

from rlhf_common.samples import Drawing  # noqa: E402
from rlhf_workers.generation.engine import SamplingParameters  # noqa: E402
from rlhf_workers.generation.vllm_engine import kernel_scan, kv_connector  # noqa: E402
from rlhf_workers.generation.vllm_engine.core_caches import CoreCaches  # noqa: E402
from rlhf_workers.generation.vllm_engine.core_drafts import CoreDrafts  # noqa: E402
from rlhf_workers.generation.vllm_engine.executor_processes import ExecutorProcess, ended_processes  # noqa: E402
from rlhf_workers.generation.vllm_engine.keyed_sampler import DRAWING, PROMPT_TOKENS, SAMPLE_KEY  # noqa: E402
from rlhf_workers.generation.vllm_engine.statistics import VllmStatistics  # noqa: E402
from rlhf_workers.generation.vllm_engine.weight_pieces import Named, pieces  # noqa: E402
from rlhf_workers.shared_memory.host_regions import HostSharing  # noqa: E402

VERSION: Final = f"{vllm.__version__}, torch {torch.__version__}"
"""Versions that may affect the last bits."""
logging.getLogger("vllm").setLevel(logging.WARNING)
kernel_scan.be_safe()


_QUEUES: Final = ("running", "waiting", "kv_holding_waiting", "deferred_waiting")
"""Names of the scheduler's queues."""


def _plain(kind: Any) -> bool:
    """Return whether JSON values can be checked against this type."""
    if get_origin(kind) in (Union, UnionType):
        return all(_plain(part) for part in get_args(kind))
    return get_origin(kind) is Literal or kind in (bool, int, float, str, NoneType)


ARGUMENTS: Final[Mapping[str, Any]] = {
    argument.name: argument.type if _plain(argument.type) else None for argument in fields(EngineArgs)
}
"""Types of vLLM's arguments by name; None for types that are not plain."""


def available_memory() -> int:
    """Return the bytes of free memory that vLLM finds for this machine or container."""
    return int(get_memory_node_info().available_memory)


@dataclass(frozen=True)
class CoreRequest:
    """A sample in the form of the core."""

    name: str
    """Name that is unique in this core."""
    tokens: Sequence[int]
    """Prompt and known response tokens."""
    prompt_tokens: int
    """Length of the prompt."""
    new_tokens: int
    """Maximum tokens to draw."""
    stop_ids: Sequence[int]
    """Tokens that end the drawing."""
    random_key: int
    salt: str = ""
    """Salt of prefix hashes; only equal salts share caches. Empty: a salt that each weight update changes."""
    drawing: Drawing = Drawing.ROLLOUT


class Drawn(NamedTuple):
    """Tokens that a step drew for one sample."""

    name: str
    tokens: list[int]
    log_probabilities: list[float]
    """Natural log-probabilities of these tokens."""
    ended: str
    """Reason why the core dropped the sample; empty while it decodes it."""


@dataclass
class CoreStep:
    """Results of one step."""

    drawn: list[Drawn] = field(default_factory=list)
    scheduled: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each sample that went through the model, including drafted ones."""
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafted tokens of each sample that were verified."""


_ARRIVING: Final = KVTransferConfig(
    kv_connector=kv_connector.CONNECTOR,
    kv_connector_module_path=kv_connector.__name__,
    kv_role="kv_consumer",  # exports are read beside vLLM, so no blocks of finished samples stay reserved
)


class ExecutorEndedError(Exception):
    """An executor process ended and decoding cannot continue; the text names the process."""


class _SampledCore(EngineCore):  # type: ignore[misc]  # vLLM's classes have no types
    """Draws by key from the first memory profile on, so that the profile includes the memory for drawing."""

    def __init__(self, config: VllmConfig, parameters: SamplingParameters) -> None:
        self._parameters = parameters
        super().__init__(config, Executor.get_class(config), log_stats=True)

    def _initialize_kv_caches(self, config: VllmConfig) -> Any:
        self.collective_rpc("rlhf_draw_by_key", args=(self._parameters,))
        return super()._initialize_kv_caches(config)


class VllmCore:
    """One model, its caches and its current samples."""

    def __init__(self, arguments: Mapping[str, Any], parameters: SamplingParameters, *, moves: bool = False) -> None:
        """`arguments` are vLLM's EngineArgs; vLLM's errors pass through.

        `moves`: samples may arrive and leave with their caches.
        """
        if moves:
            arguments = {**arguments, "kv_transfer_config": _ARRIVING}
        set_num_threads = torch.set_num_threads
        try:
            config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)  # an offline batch
            with environment.within_the_pod(os.environ):
                self._core: Any = _SampledCore(config, parameters)
        finally:
            torch.set_num_threads = set_num_threads  # vLLM's CPU worker changes it for the whole process
        self._processes: list[ExecutorProcess] = [
            worker.proc for worker in getattr(self._core.model_executor, "workers", ())
        ]
        if self._processes:
            self._core.collective_rpc("rlhf_bind_to_worker")
        self._caches = CoreCaches(self._core, self._call_all) if moves else None
        self.drafts = CoreDrafts(self._core)
        """Drafts that the next step verifies."""
        self.statistics = VllmStatistics(config)
        """vLLM's own statistics."""
        self._counts = True
        """Whether steps are counted in the statistics."""
        self._sleeps = config.model_config.enable_sleep_mode and not current_platform.is_cpu()
        self._newest = CoreStep()
        self._updates = 0
        """Number of complete updates of the policy's weights; part of the default salt of prefix hashes."""
        self._record_schedules()

    def add(self, request: CoreRequest) -> None:
        """Add a sample."""
        parameters = SamplingParams(
            max_tokens=request.new_tokens,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={
                SAMPLE_KEY: str(request.random_key),
                PROMPT_TOKENS: request.prompt_tokens,
                DRAWING: int(request.drawing),
            },
        )
        message = EngineCoreRequest(
            request_id=request.name,
            prompt_token_ids=list(request.tokens),
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time(),
            lora_request=None,
            cache_salt=request.salt or f"update {self._updates}",
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(message))
        if self._counts:
            self.statistics.added(request.name)

    def abort(self, names: Sequence[str]) -> None:
        """Drop samples; ignore unknown names."""
        if names:
            self._core.abort_requests(list(names))
            self.statistics.dropped(names)

    def step(self) -> CoreStep:
        """Schedule, run the model once, and draw; do nothing if caches may move and all samples are paused."""
        self._newest = CoreStep()
        if self._caches is not None and not self._caches.moving():
            return self._newest
        try:
            outputs, executed = self._core.step_fn()
        except Exception as error:
            if ended := ended_processes(self._processes):
                raise ExecutorEndedError(f"{ended}; vLLM cannot go on without: {error}") from error
            raise
        finally:
            self.drafts.take_back()
        self._core.post_step(model_executed=executed)
        groups = list((outputs or {}).values())
        if self._counts:
            self.statistics.stepped(groups)
        self._newest.drawn = [_drawn(output) for group in groups for output in group.outputs]
        return self._newest

    def drained(self) -> Iterator[CoreStep]:
        """Yield results that were computed ahead, if the core schedules before it sees a step's tokens."""
        if not self._core.batch_queue:
            return
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            for _ in range(self._core.batch_queue_size):  # each returns an earlier schedule's results
                yield self.step()
        finally:
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def replace_weights(self, named: Iterable[Named]) -> None:
        """Load a complete set of weights, named as in a checkpoint; nothing may be computed ahead.

        Samples keep their keys and values. Later samples find no prefix of the old weights. After an error the model
        has no version.
        """
        self._replace(named, draft=False)
        self._updates += 1

    def replace_draft_weights(self, named: Iterable[Named]) -> None:
        """Load a complete set of weights into vLLM's own draft model."""
        self._replace(named, draft=True)

    def _replace(self, named: Iterable[Named], *, draft: bool) -> None:
        self._core.collective_rpc("rlhf_begin_weights", args=(draft,))
        if isinstance(self._core.model_executor, UniProcExecutor):
            self._core.collective_rpc("rlhf_load_weights", args=(named,))
        else:
            for piece in pieces(named, HostSharing()):
                self._core.collective_rpc("rlhf_load_piece", args=(piece,))
        self._core.collective_rpc("rlhf_finish_weights")

    @property
    def caches(self) -> CoreCaches | None:
        """The mover of caches; None if built without `moves`."""
        return self._caches

    # ------------------------------------------------------------ sleep

    def sleep(self) -> None:
        """Free caches and weights on the device if vLLM's sleep mode is on, or caches on a CPU; the core must have no
        request.

        vLLM's level 1 stores the weights in host memory.
        """
        if self._sleeps:
            self._core.sleep(level=1, mode="abort")
        elif current_platform.is_cpu():
            self._core.reset_prefix_cache()
            self._core.collective_rpc("rlhf_free_caches")

    def wake_weights(self) -> None:
        """Move the weights back to the device, if vLLM's sleep mode is on."""
        if self._sleeps:
            self._core.wake_up(tags=["weights"])

    def wake_caches(self) -> None:
        """Allocate the caches again, empty; the weights must be on the device."""
        if self._sleeps:
            self._core.wake_up(tags=["kv_cache"])
        elif current_platform.is_cpu():
            self._core.collective_rpc("rlhf_take_caches")

    # ------------------------------------------------------------ measuring

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put the current requests aside inside; afterwards the core continues them with their caches."""
        scheduler = self._core.scheduler
        queues = {name: getattr(scheduler, name) for name in _QUEUES}
        self._counts = False
        try:
            for name in _QUEUES:
                setattr(scheduler, name, type(queues[name])())
            yield
        finally:
            for name in _QUEUES:
                setattr(scheduler, name, queues[name])
            self._counts = True

    def fitting(self, tokens: int) -> int:
        """Return how many more requests of `tokens` tokens fit into the free blocks."""
        scheduler = self._core.scheduler
        free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free // -(-tokens // int(scheduler.block_size))

    def add_cached(self, request: CoreRequest, cached: int) -> None:
        """Add a request as if its first `cached` tokens were in the caches; MemoryError if no blocks are free for
        them."""
        self.add(request)
        own = self._core.scheduler.requests[request.name]
        if self._core.scheduler.kv_cache_manager.allocate_slots(own, cached, delay_cache_blocks=True) is None:
            raise MemoryError(f"no room for the caches of {cached} tokens")
        own.num_computed_tokens = cached

    def cache_sizes(self) -> tuple[int, int]:
        """Return the bytes of all caches in all executor processes, and the tokens that fit; the core must be awake."""
        scheduler = self._core.scheduler
        sizes: list[int] = self._core.collective_rpc("rlhf_cache_bytes")
        return sum(sizes), scheduler.kv_cache_config.num_blocks * int(scheduler.block_size)

    def close(self) -> None:
        """Release memory and executor processes."""
        self._core.shutdown()

    def _call_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        return list(self._core.collective_rpc(method, args=arguments))

    def _record_schedules(self) -> None:
        schedule = self._core.scheduler.schedule

        def recorded(*arguments: Any, **named: Any) -> Any:
            scheduled = schedule(*arguments, **named)
            self._newest.scheduled = dict(scheduled.num_scheduled_tokens)
            self._newest.drafts = dict(scheduled.scheduled_spec_decode_tokens)
            return scheduled

        self._core.scheduler.schedule = recorded


def _drawn(output: Any) -> Drawn:
    tokens = list(output.new_token_ids)
    figures: Iterable[float] = [] if output.new_logprobs is None else output.new_logprobs.logprobs[: len(tokens), 0]
    ended = "" if output.finish_reason is None else str(output.finish_reason)
    return Drawn(output.request_id, tokens, [float(figure) for figure in figures], ended)
