"""Inter-stage fusion and incremental scoring: costs, lengths, plans, moves of samples, prefixes.

It carries out decisions of `scheduling.consolidation` and `scheduling.incremental_dispatch`.
"""
