"""All findings of a job's last iterations, the largest loss first.

Rule: pure. Iterations with other settings than the last one are left out, and so is the first iteration of a job where
there are others, as its workers still warm up.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.facts import IterationFacts
from rlhf_planner.explain.finding import Finding
from rlhf_planner.explain.registry import CAUSES

SHOWN: Final = 3
"""Findings that are shown where nobody asked for all."""


def explain(facts: Sequence[IterationFacts]) -> list[Finding]:
    """Return the findings of these iterations, oldest first; empty where no loss is worth a word, or nothing was
    recorded."""
    alike = comparable(facts)
    if not alike:
        return []
    findings = [finding for cause in CAUSES if (finding := cause.find(alike)) is not None]
    return sorted(findings, key=lambda finding: -finding.seconds)


def comparable(facts: Sequence[IterationFacts]) -> list[IterationFacts]:
    """Return the iterations that findings are about."""
    if not facts:
        return []
    alike = [one for one in facts if one.settings == facts[-1].settings and one.total > 0]
    later = [one for one in alike if one.iteration > 0]
    return later or alike
