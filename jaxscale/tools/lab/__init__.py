"""Experiments on recipes: ordinary runs that differ in a few settings, and what they show with its uncertainty."""
