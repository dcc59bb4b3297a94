"""Text in: files of many formats as documents, tokenizers, conversations."""
