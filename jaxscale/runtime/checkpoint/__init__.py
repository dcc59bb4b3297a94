"""Saves and restores the train state, the data position and the resolved config."""
