"""Text generation with a KV cache, and the chat page."""
