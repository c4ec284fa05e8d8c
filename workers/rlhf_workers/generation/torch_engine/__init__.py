"""The torch engine: any causal language model that transformers loads, decoded by continuous batching."""
