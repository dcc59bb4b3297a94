"""Imports and exports of Hugging Face models, PEFT adapters and tokenizers."""
