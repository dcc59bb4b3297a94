"""The lowest package: exit codes, files and buckets, processes, redaction, injected faults."""
