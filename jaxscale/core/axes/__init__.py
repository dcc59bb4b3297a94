"""Collectives per mesh axis, the links under them, and pipeline schedules."""
