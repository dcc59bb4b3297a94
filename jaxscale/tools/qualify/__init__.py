"""Measures matmuls, memory, links, kernels, a training step and storage on a machine."""
