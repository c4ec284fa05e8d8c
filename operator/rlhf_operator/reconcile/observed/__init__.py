"""The observed state of a job and its pods: records with typed, bounded fields, read from what others wrote."""
