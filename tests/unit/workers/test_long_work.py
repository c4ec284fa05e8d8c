"""Reports of a worker about long work, and detection of steps that take too long."""

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.decode_watchdog import hung_step, stack_of
from rlhf_workers.failures import failure_of
from rlhf_workers.generation.vllm_engine.failures import build_failure
from rlhf_workers.generation.vllm_engine.log_lines import (
    LINES_PER_MINUTE,
    MAX_CHARACTERS,
    BoundedLines,
    reported_build,
)
from rlhf_workers.progress import present_stage, stage


def test_the_innermost_stage_is_told_with_how_far_it_is() -> None:
    assert present_stage() == ""
    with stage("building the generation role"):
        with stage("fetching actor version 3") as fetching:
            fetching.reached(40, 100)
            assert present_stage() == "fetching actor version 3 40%"
            fetching.reached(40, 0)
            assert present_stage() == "fetching actor version 3"
        assert present_stage() == "building the generation role"
    assert present_stage() == ""


@given(st.floats(0, 1e6), st.floats(0, 1e4), st.sampled_from(["generation", "inference", "training"]))
def test_only_a_decode_step_beyond_its_limit_hangs(seconds: float, limit: float, role: str) -> None:
    failure = hung_step((role, 10.0), limit, 10.0 + seconds, lambda: ["  File a.py, line 3, in step\n    wait()\n"])
    hangs = role == "generation" and limit > 0 and (10.0 + seconds) - 10.0 > limit
    assert (failure is not None) == hangs
    assert failure is None or "it is at File a.py, line 3, in step wait()" in failure.message
    assert hung_step(None, limit, seconds, list) is None


def test_the_stack_of_another_thread_names_the_line_that_it_is_in() -> None:
    go_on, begun = threading.Event(), threading.Event()

    def wait_for_long() -> None:
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=wait_for_long)
    thread.start()
    begun.wait()
    stack = stack_of(thread.ident)
    go_on.set()
    thread.join()
    assert any("in wait_for_long" in frame for frame in stack)
    assert stack_of(None) == []


def record(text: str, name: str = "vllm.v1.engine") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "file.py", 1, text, None, None)


def test_lines_of_vllm_are_bounded_in_number_and_length_and_those_of_others_are_not() -> None:
    now = [0.0]
    bound = BoundedLines(lambda: now[0])
    assert sum(bound.filter(record("line")) for _ in range(500)) == LINES_PER_MINUTE
    assert all(bound.filter(record("line", "rlhf_workers")) for _ in range(500))
    now[0] = 61.0
    first = record("x" * 10_000)
    assert bound.filter(first)
    assert first.getMessage().startswith(f"({500 - LINES_PER_MINUTE} lines of vLLM were dropped before this one) x")
    assert len(first.getMessage()) < MAX_CHARACTERS + 100


def test_what_vllm_says_while_it_is_built_is_what_the_worker_does(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm")
    level = logger.level
    # As vLLM leaves it that was imported before its environment was set.
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    with reported_build():
        assert present_stage() == "building the vLLM engine"
        logging.getLogger("vllm.model_loader").info("Loading weights took %.2f seconds\nand more", 1.5)
        assert present_stage() == "in vLLM: Loading weights took 1.50 seconds"
    assert (logger.level, present_stage()) == (level, "")
    assert "Loading weights took 1.50 seconds" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason", "field", "retryable"),
    [
        (
            ValueError("To serve ..., (2.0 GiB KV cache is needed, which is larger than the available KV cache memory"),
            "CacheTooSmall",
            "spec.rollout.maxResponseTokens",
            False,
        ),
        (
            ValueError("Free memory on device cuda:0 (1/80 GiB) is less than desired GPU memory utilization"),
            "OutOfMemory",
            "spec.generation.engineArgs.gpu_memory_utilization",
            True,
        ),
        (
            RuntimeError("Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...'"),
            "OutOfMemory",
            "spec.generation.parallelism.tensor",
            True,
        ),
        (ValueError("no such architecture"), "EngineUnavailable", "spec.models.actor.path", False),
    ],
)
def test_what_vllm_cannot_do_names_the_field_to_change(
    error: Exception, reason: str, field: str, retryable: bool
) -> None:
    failure = build_failure(error, "/models/policy", 4096).failure
    assert (failure.reason, failure.field, failure.retryable) == (reason, field, retryable)
    assert str(error) in failure.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB', please check"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        MemoryError("no room"),
    ],
)
def test_memory_that_was_not_given_names_the_field_that_changes_it(error: Exception) -> None:
    failure = failure_of(error, "generation")
    assert (failure.reason, failure.field) == ("OutOfMemory", "spec.generation.maxBatchSize")
    assert str(error) in failure.message
