"""The training loop around the compiled step: batches, limits, recovery, replicas and reports."""
