"""Inter-stage fusion and incremental scoring at work: costs, lengths, plans, moves of samples, prefixes.

  fusion_planning      costs are measured once; every iteration gets a threshold, a pool and a way to move samples
  learning             what an iteration teaches: response lengths, and costs by the observations of workers
  sample_moves         samples on their way from worker to worker
  incremental_scoring  what is scored of unfinished samples; counterfactual says whether that gains anything

Owns what becomes of the decisions of `scheduling.consolidation` and `scheduling.incremental_dispatch`, and the choices
that are simulated in a thread. Rule: whatever goes wrong here costs time and changes no token, score or batch. Must
never hold up the loop: nothing waits for a choice.
"""
