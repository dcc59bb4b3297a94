"""Optimizers, learning-rate schedules and parameter groups, as optax transformations."""
