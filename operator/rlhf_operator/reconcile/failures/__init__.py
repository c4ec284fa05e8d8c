"""What follows from pods that end: counts, the failure policy, back-offs, and workers that are silent."""
