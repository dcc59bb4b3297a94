"""Text sources in many file formats, tokenizers, and conversations."""
