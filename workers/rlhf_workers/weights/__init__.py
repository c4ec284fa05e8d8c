"""Transfers weights between workers, moves them between host and device, and reads and writes weight files."""
