"""Exit codes, files and buckets, process environment, redaction of secrets, and fault injection."""
