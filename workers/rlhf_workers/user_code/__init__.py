"""Runs code of users (reward functions and environments) in separate processes."""
