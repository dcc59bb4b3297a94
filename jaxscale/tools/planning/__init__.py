"""Estimates cost, time and memory of a run without a compiler."""
