"""Documents to packed rows of token ids: numpy on the host, never jax."""
