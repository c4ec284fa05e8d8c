"""Runs one way of benchmarks/engines.py in a process: decodes batches on request, and reports the time of each.

Rule: one JSON argument is the configuration. The process answers once when it is ready. It then answers each line of
its standard input, a list of [prompt, response tokens], with one JSON object. Batches share no cache, since each has
new prompts. Must never print anything else to its standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import transformers

from rlhf_common.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer

Batch = Sequence[tuple[list[int], int]]
Decode = Callable[[Batch], list[int]]
"""Decodes a batch; returns the number of response tokens of each request."""
CPU: Final = torch.device("cpu")


def vllm_generate(wanted: dict[str, Any]) -> Decode:
    """LLM.generate with tokens in and out, and the log-probability of each."""
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=wanted["model"],
        dtype="float32",
        max_model_len=wanted["prompt"] + wanted["response"],
        max_num_seqs=wanted["slots"],
        block_size=32,
        kv_cache_memory_bytes=wanted["cache_bytes"],
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )

    def decode(batch: Batch) -> list[int]:
        parameters = [
            vllm.SamplingParams(max_tokens=limit, ignore_eos=True, detokenize=False, logprobs=0) for _, limit in batch
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in batch], parameters, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return decode


def torch_engine(wanted: dict[str, Any]) -> Decode:
    """The torch engine, driven step by step."""
    model = load_causal_lm(wanted["model"], field="model", dtype=torch.float32, device=CPU, attention="sdpa")
    engine = TorchEngine(
        model,
        load_tokenizer(wanted["model"], "model"),
        SamplingParameters(),
        EngineLimits(wanted["slots"], wanted["prompt"], wanted["response"]),
        deterministic=False,
        fused_kernels=wanted["fused"],
    )

    def decode(batch: Batch) -> list[int]:
        engine.submit(
            [
                SampleRequest(SampleKey(0, number, 0), np.array(prompt, np.int32), number, limit)
                for number, (prompt, limit) in enumerate(batch)
            ]
        )
        lengths = [0] * len(batch)
        while engine.in_flight:
            for response in engine.step().finished:
                lengths[response.key.sample] = len(response.tokens)
        return lengths

    return decode


def transformers_generate(wanted: dict[str, Any]) -> Decode:
    """transformers.generate on left-padded batches of the same size as the others, each up to its longest response."""
    model = load_causal_lm(wanted["model"], field="model", dtype=torch.float32, device=CPU, attention="sdpa")

    def decode(batch: Batch) -> list[int]:
        for first in range(0, len(batch), wanted["slots"]):
            part = batch[first : first + wanted["slots"]]
            longest = max(len(prompt) for prompt, _ in part)
            ids, mask = torch.zeros(2, len(part), longest, dtype=torch.int64)
            for row, (prompt, _) in enumerate(part):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(limit for _, limit in part)
                )
        return [limit for _, limit in batch]

    return decode


WAYS: Final[dict[str, Callable[[dict[str, Any]], Decode]]] = {
    "vllm": vllm_generate,
    "torch": torch_engine,
    "transformers": transformers_generate,
}


def main() -> None:
    """Serve the parent."""
    wanted = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there
    torch.set_num_threads(wanted["threads"])
    transformers.utils.logging.set_verbosity_error()
    decode = WAYS[wanted["way"]](wanted)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        lengths = decode(batch)
        taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        if lengths != [limit for _, limit in batch]:
            raise SystemExit(f"asked for {[limit for _, limit in batch]} tokens, got {lengths}")
        print(json.dumps(taken), file=answers, flush=True)


if __name__ == "__main__":
    main()
