"""Sweeps of small runs, and results with confidence intervals."""
