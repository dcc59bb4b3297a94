"""The data pipeline from documents to packed sequences of token ids, in numpy on the host, without jax."""
