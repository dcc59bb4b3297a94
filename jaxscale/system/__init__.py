"""Exit codes, files and buckets, processes, redaction of secrets, and fault injection."""
