"""Estimates of cost, time and memory from a config and the name of a machine, without a compiler."""
