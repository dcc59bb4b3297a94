"""Experiments that compare recipes: runs that differ in a few settings, and results with error bars."""
