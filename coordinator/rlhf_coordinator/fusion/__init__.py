"""Inter-stage fusion at work: moving samples, measuring and learning what things take, scoring prefixes early.

Owns what becomes of a decision of `scheduling.consolidation` and `scheduling.incremental_dispatch`, and the choices
that are simulated in a thread.
Rule: an accelerator only. Whatever goes wrong here costs time and changes no token, score or batch.
Must never hold up the loop; nobody waits for a choice.
"""
