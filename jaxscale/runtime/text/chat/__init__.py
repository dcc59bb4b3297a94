"""Fine-tuning data: conversations and prompt-completion pairs as token ids with a loss mask."""
