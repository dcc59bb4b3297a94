"""Readers of raw text in every format, with bounded memory; each document keeps its origin."""
