"""Why an iteration takes as long as it does: recorded facts in, ranked findings in words and numbers out.

    facts (recorded by the coordinator) -> causes (one module each, in registry.CAUSES) -> ranking.explain

Rule: pure. A gain is only given where a replay of what was recorded meets what was measured; otherwise a finding says
that it is not known, or there is none. Nothing here decides anything.
"""
