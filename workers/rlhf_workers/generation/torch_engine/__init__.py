"""The torch engine: continuous batching for any causal language model that transformers loads."""
