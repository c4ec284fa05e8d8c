"""vLLM drafts with its own model, as `engineArgs` may say on a GPU; here on a CPU, where it is refused to users.

The reference is an engine without drafts. vLLM allows one kind of engine in a process, so one runs after the other.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.vllm_policy import CPU, RESPONSE, Policy

from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.vllm_engine import build

pytestmark = pytest.mark.full


def test_drafts_of_vllms_own_model_are_verified_by_key_and_the_model_takes_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = Policy(tmp_path / "policy", "llama")
    policy.model.save_pretrained(tmp_path / "draft")
    samples, weights = requests(4, seed=4, response=RESPONSE), policy.train(2)
    policy.engine.load_weights(weights, 2)
    wanted = finish(policy.engine, samples)
    policy.engine.close()

    own = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    monkeypatch.setattr(build, "speculation_arguments", lambda *_: own)
    generation = policy.spec.generation.model_copy(update={"engine_args": {"speculative_config": own}})
    engine = build.build_engine(policy.spec.model_copy(update={"generation": generation}), policy.tokenizer, CPU)
    engine.load_weights(weights, 2)

    def accepted() -> float:
        engine.submit(samples)
        reports: list[StepReport] = []
        while engine.in_flight:
            reports.append(engine.step())
        for part in (part for report in reports for part in report.finished):
            assert part.tokens.tolist() == wanted[part.key.sample].tokens.tolist()
            assert np.abs(part.log_probabilities - wanted[part.key.sample].log_probabilities).max() < 1e-5
        return sum(report.accepted for report in reports) / sum(report.drafted for report in reports)

    assert accepted() < 0.5, "it drafts by the weights of before"
    assert engine.vllm_draft_model is not None
    assert engine.vllm_draft_model.load_weights(weights) == sum(tensor.nbytes for tensor in weights.values())
    assert accepted() == 1.0
    with pytest.raises(WorkError, match=r"the draft model: model\.norm\.weight is missing"):
        engine.vllm_draft_model.load_weights({name: weights[name] for name in weights if name != "model.norm.weight"})
    assert accepted() == 1.0
    engine.close()
    torch.set_num_threads(threads)
