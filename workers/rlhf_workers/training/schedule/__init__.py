"""Execution of a rank's row of a schedule table, and its timing.

Rule: the table is data; the executor never reorders it.
"""
