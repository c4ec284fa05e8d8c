"""The samples of an evaluation go to workers: to be decoded, and to be judged.

Rule: what was decided is carried out as for samples of the batch, under keys of the evaluation; the random key of a
response depends on the seed, the version and its number alone, so whoever decodes it draws the same.
"""

from rlhf_api import control_pb2 as pb
from rlhf_api.samples import Drawing, SampleKey
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling.decisions import EvaluateSamples, EvaluateScores
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.prompts import Prompt, random_key
from rlhf_coordinator.storage.sample_codec import generate_sample, score_sample


def generate(run: JobRun, decision: EvaluateSamples) -> None:
    """Lease samples to a worker to decode."""
    ledger, settings, spec = run.state.evaluation.ledger, run.context.spec.evaluation, run.context.spec
    assert ledger is not None
    assert settings is not None
    drawing = Drawing.EVALUATION if settings.temperature else Drawing.GREEDY
    samples = []
    for index in decision.samples:
        number, known = FIRST_SAMPLE + index, ledger.samples[index].response
        key = SampleKey(ledger.iteration, number, ledger.assign(index, decision.worker))
        randomness = random_key(spec.seed, ledger.iteration, number)
        limit = spec.rollout.max_response_tokens
        prompt = _prompt(run, index)
        record = prompt.record if spec.rollout.environment else ""
        samples.append(generate_sample(key, prompt.tokens, known, randomness, limit, drawing, record))
    detail = f"take {len(samples)} samples of an evaluation"
    command = pb.Command(generate=pb.Generate(samples=samples))
    send(run, decision.worker, command, PendingCommand(CommandKind.GENERATE, 0.0, detail))


def score(run: JobRun, decision: EvaluateScores) -> None:
    """Lease finished samples to a worker to judge."""
    ledger = run.state.evaluation.ledger
    assert ledger is not None
    samples = []
    for index, tasks in decision.samples:
        key = SampleKey(ledger.iteration, FIRST_SAMPLE + index, ledger.assign_scores(index, tasks, decision.worker))
        prompt = _prompt(run, index)
        samples.append(score_sample(key, tasks, prompt.tokens, prompt.text, prompt.record, ledger.samples[index]))
    detail = f"take {len(samples)} samples of an evaluation to score"
    command = pb.Command(score=pb.Score(samples=samples))
    send(run, decision.worker, command, PendingCommand(CommandKind.SCORE, 0.0, detail))
    run.state.fleet.workers[decision.worker].scorer_onloaded = True


def _prompt(run: JobRun, index: int) -> Prompt:
    settings = run.context.spec.evaluation
    assert settings is not None
    return run.evaluation_prompts[index // settings.samples_per_prompt]
