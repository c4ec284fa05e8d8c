"""What a job runs by, kept from its start to its end: `pinning` decides when it changes."""
