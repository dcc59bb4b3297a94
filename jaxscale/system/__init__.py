"""What every room stands on: exit codes, files and buckets, processes, redaction, faults made on purpose."""
