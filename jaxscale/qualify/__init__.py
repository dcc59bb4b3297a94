"""What a machine does, measured: products, memory, links, kernels, a training step, storage."""
