"""Optimizers, learning-rate schedules and parameter groups: optax in, optax out."""
