"""Functions on arrays: attention, projections, norms, rotary embeddings, activations and the loss."""
