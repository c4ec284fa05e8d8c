"""The revision that a job runs with from its start to its end: `pinning` decides when it changes."""
