"""Collectives of each mesh axis, and pipeline schedules."""
