"""Pipeline stages with Megatron-core modules: their construction, and the conversion of their weights."""
