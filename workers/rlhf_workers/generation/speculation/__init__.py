"""Speculative decoding on a generation worker: who guesses a sample's next tokens, and how far guesses are followed.

Rule: a guess never changes a token. A drafted token is accepted where it equals the token that `generation.sampling`
draws at that position, so nothing here may reach a sample but through an engine's verification.
"""
