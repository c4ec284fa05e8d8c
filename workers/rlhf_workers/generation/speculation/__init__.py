"""Speculative decoding on a generation worker: drafters guess a sample's next tokens, a controller limits the guesses.

Rule: a drafted token is accepted if it equals the token drawn at that position, so a guess changes a token at most by
rounding.
"""
