"""Responses of several turns: the policy's, and between them what an environment answers."""
