"""The data pipeline, from documents to packed rows of token ids: numpy on the host, without jax."""
