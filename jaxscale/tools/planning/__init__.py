"""Estimates the cost, time and memory of a run without compiling it."""
