"""The steps: one module each, named in registry.py."""
