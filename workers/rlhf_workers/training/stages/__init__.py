"""Pipeline stages of models: cut, filled from files, adapted, moved to host memory, and computed."""
