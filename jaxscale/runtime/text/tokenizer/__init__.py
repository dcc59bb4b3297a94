"""Tokenizers behind one interface: bytes, tokenizer.json, WordPiece and SentencePiece models."""
