"""Explains why an iteration takes as long as it does: recorded facts in, ranked findings out.

    facts (recorded by the coordinator) -> causes (in registry.CAUSES) -> ranking.explain

Rule: pure. A finding names a gain that follows from a replay, a fit or measured times. Otherwise the finding says that
the gain is unknown, or there is no finding.
"""
