"""Measures a machine: matrix products, memory, links, kernels, a training step and storage."""
