"""Text to token ids and back, for bytes, tokenizer.json and SentencePiece models, behind one interface."""
