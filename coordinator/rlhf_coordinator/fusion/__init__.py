"""Inter-stage fusion and incremental scoring: costs, lengths, plans, moves of samples, prefixes.

  fusion_planning      measure costs; choose a threshold, a pool and a transfer method for an iteration
  learning             learn from an iteration: costs from the observations of workers, and (learned_lengths) lengths
  sample_moves         moves of samples from worker to worker; reallocation measures the gain of balancing moves
  incremental_scoring  scoring of unfinished samples; counterfactual decides whether that is a gain

It carries out decisions of `scheduling.consolidation` and `scheduling.incremental_dispatch`.
"""
