"""One vLLM engine of benchmarks/vllm_rollout.py in a process: runs rollouts on request, and times their parts.

Rule: one JSON argument is the configuration. The process reads one line from its standard input for every rollout and
answers with one JSON object. Wrappers around vLLM's functions take the time, each without the calls to other wrapped
functions. Must never print anything else to its standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np

PARTS: Final = (
    ("scheduler", "scheduler", ("schedule", "update_from_output", "add_request")),
    (
        "input preparation",
        "runner",
        ("_update_states", "_prepare_inputs", "_build_attention_metadata", "_preprocess", "_get_slot_mappings"),
    ),
    ("model", "runner", ("_model_forward",)),
    ("logits", "model", ("compute_logits",)),
    ("sampler", "runner", ("_sample",)),
    ("bookkeeping", "runner", ("_bookkeeping_sync",)),
    ("output processing", "output_processor", ("process_outputs",)),
    ("detokenizer", "detokenizer", ("update",)),
    ("statistics", "logger_manager", ("record",)),
)
"""Name of a part, the owner of its functions, and the functions."""


class Stopwatches:
    """Seconds by part; the innermost running part counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Count time for `part` until the block ends or another part begins in it."""
        self._switch()
        self._running.append(part)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            part = self._running[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def around(self, owner: Any, name: str, part: str) -> None:
        """Wrap a method of an object or a class with a stopwatch."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)


class Rollouts:
    """An engine and its repeated requests."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        vllm = import_module("vllm")
        self._wanted = wanted
        arguments = {**wanted["arguments"], "model": wanted["model"]}
        self._llm: Any = vllm.LLM(**arguments)
        self._engine: Any = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._sampling = vllm.SamplingParams
        self._prompts = [prompt for prompt, _ in wanted["requests"]]
        self._params = [self._parameters(limit) for _, limit in wanted["requests"]]
        self._watches = Stopwatches()
        if wanted["parts"]:
            self._watch()

    def _parameters(self, limit: int) -> Any:
        more = {"detokenize": self._wanted["detokenize"], "logprobs": self._wanted["logprobs"]}
        return self._sampling(max_tokens=limit, ignore_eos=True, temperature=1.0, **more)

    def _watch(self) -> None:
        worker = self._core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        owners = {
            "scheduler": self._core.scheduler,
            "runner": runner,
            "model": runner.model,
            "output_processor": self._engine.output_processor,
            "detokenizer": import_module("vllm.v1.engine.detokenizer").BaseIncrementalDetokenizer,
            "logger_manager": self._engine.logger_manager,
        }
        for part, owner, names in PARTS:
            if owners[owner] is not None:
                for name in names:
                    self._watches.around(owners[owner], name, part)

    def run(self) -> dict[str, Any]:
        """Serve all requests; return seconds by the clock and of the processor, and by part."""
        self._core.scheduler.reset_prefix_cache()
        self._watches.seconds = {}
        began, cpu = time.perf_counter(), time.process_time()
        with self._watches.inside("rest"):
            steps = self._generate() if self._wanted["way"] == "LLM.generate" else self._step_core()
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "steps": steps,
            "parts": self._watches.seconds,
        }

    def _generate(self) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt in self._prompts]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        self._check(lengths)
        return max(lengths)

    def _step_core(self) -> int:
        request = import_module("vllm.v1.engine").EngineCoreRequest
        client, lengths, steps = self._engine.engine_core, [0] * len(self._prompts), 0
        for number, (prompt, parameters) in enumerate(zip(self._prompts, self._params, strict=True)):
            client.add_request(
                request(str(number), prompt, None, parameters.clone(), None, time.time(), None, None, None)
            )
        while self._core.scheduler.has_requests():
            steps += 1
            for output in client.get_output().outputs:
                lengths[int(output.request_id)] += len(output.new_token_ids)
        self._check(lengths)
        return steps

    def _check(self, lengths: list[int]) -> None:
        wanted = [limit for _, limit in self._wanted["requests"]]
        if lengths != wanted:
            raise SystemExit(f"asked for {wanted} tokens, got {lengths}")


def main() -> None:
    """Serve the parent process."""
    wanted = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its libraries print there
    began = time.perf_counter()
    rollouts = Rollouts(wanted)
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(rollouts.run()), file=answers, flush=True)


def requests_of(samples: int, prompt: int, response: int, vocabulary: int, seed: int) -> list[tuple[list[int], int]]:
    """Return (prompt, response tokens) of a long-tailed batch.

    Half of the responses have at most a quarter of the longest length.
    """
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(np.log(response / 4), 0.8, samples).astype(int) + 1, response)
    return [(random.integers(3, vocabulary, prompt).tolist(), int(length)) for length in lengths]


if __name__ == "__main__":
    main()
