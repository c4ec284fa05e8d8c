"""Changes the plan of a job with `spec.devices` whose predictions have stopped to hold."""
