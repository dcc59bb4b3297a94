"""Readers of text in many file formats, tokenizers, and chat templates."""
