"""A run in a work folder: data, checkpoints, hosts, monitoring, evaluation, sampling, and the training loop."""
