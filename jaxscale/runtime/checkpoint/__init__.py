"""Saving and restoring the train state, the data position and the resolved config."""
