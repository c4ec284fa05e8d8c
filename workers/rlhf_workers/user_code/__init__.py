"""Code of users in processes of its own: reward functions and environments."""
