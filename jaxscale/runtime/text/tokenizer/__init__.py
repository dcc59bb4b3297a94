"""Tokenizers with a common interface: bytes, tokenizer.json, WordPiece and SentencePiece models."""
