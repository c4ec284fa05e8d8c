"""Speculative decoding on a generation worker: drafters guess a sample's next tokens, a controller limits the guesses.

Rule: a guess changes a token at most by rounding. A drafted token is accepted if it equals the token drawn at that
position, so drafts reach a sample only through an engine's verification.
"""
