"""Running a rank's row of a schedule table, and timing it.

Rule: the table is data; the executor never reorders it.
"""
