"""The vLLM engine: vLLM's scheduler, paged caches and kernels, with this project's sampling, weights and samples."""
