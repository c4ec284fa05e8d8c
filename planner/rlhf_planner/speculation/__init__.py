"""Speculative decoding as decisions: what drafts are expected to give, and how far to draft."""
