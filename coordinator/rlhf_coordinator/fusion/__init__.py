"""Inter-stage fusion and incremental scoring: costs, lengths, plans, moves of samples, prefixes."""
