"""The training loop: batches, limits, recovery, replicas and reports around the compiled step."""
