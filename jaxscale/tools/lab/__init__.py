"""Sweeps of small runs, with confidence intervals."""
