"""Consequences of ended pods: messages, counts, the failure policy, back-offs, and silent workers."""
