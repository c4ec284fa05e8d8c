"""Consequences of ended pods: counts, the failure policy, back-offs, and silent workers."""
