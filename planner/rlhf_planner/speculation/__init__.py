"""Decisions of speculative decoding: the expected gain of drafts, and how many tokens to draft."""
