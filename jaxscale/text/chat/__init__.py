"""Conversations and pairs of prompt and completion as documents of which only what the assistant says is learned."""
