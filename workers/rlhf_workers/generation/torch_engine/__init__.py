"""The torch engine: continuous batching for causal language models of transformers that take explicit masks."""
