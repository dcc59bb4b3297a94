"""Readers of raw text in all supported formats, with bounded memory. Each document has its origin."""
