"""Responses of several turns: turns of the policy with answers of an environment between them."""
