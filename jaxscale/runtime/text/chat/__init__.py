"""Converts conversations and prompt-completion pairs to token ids with a loss mask, for fine-tuning."""
