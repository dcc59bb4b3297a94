"""Measures matmuls, memory, links, kernels, a training step and storage of a machine."""
