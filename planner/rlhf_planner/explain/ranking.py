"""Ranks the findings of a job's last iterations, the largest loss first. Rule: pure.

Iterations with other settings than the last one are left out.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.registry import CAUSES

SHOWN: Final = 3
"""Findings shown by default."""


def explain(facts: Sequence[IterationProfile]) -> list[Finding]:
    """Return the findings, the largest loss first. `facts` are iterations, oldest first."""
    alike = comparable(facts)
    if not alike:
        return []
    findings = [finding for cause in CAUSES if (finding := cause.find(alike)) is not None]
    return sorted(findings, key=lambda finding: -finding.seconds)


def headline(facts: Sequence[IterationProfile]) -> str:
    """Return a line with the mean seconds of comparable iterations and of their phases.

    Raises ValueError if no iteration is comparable.
    """
    seen = comparable(facts)
    if not seen:
        raise ValueError("no iteration is recorded")
    seconds = sum(profile.total for profile in seen) / len(seen)
    phases: dict[str, float] = {}
    for profile in seen:
        for name, spent in profile.phases.items():
            phases[name] = phases.get(name, 0.0) + spent / len(seen)
    parts = ", ".join(f"{name} {spent:.3g} s ({spent / seconds:.0%})" for name, spent in phases.items() if spent > 0)
    which = (
        f"iterations {seen[0].iteration} to {seen[-1].iteration}" if len(seen) > 1 else f"iteration {seen[0].iteration}"
    )
    return f"{which}: {seconds:.3g} s each; {parts}"


def comparable(facts: Sequence[IterationProfile]) -> list[IterationProfile]:
    """Return the iterations that findings are based on."""
    if not facts:
        return []
    alike = [profile for profile in facts if profile.settings == facts[-1].settings and profile.total > 0]
    later = [profile for profile in alike if profile.iteration > 0]
    return later or alike
