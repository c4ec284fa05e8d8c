"""Evaluation during training: a weight version answers prompts; the responses are scored, never trained on."""
