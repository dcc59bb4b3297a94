"""Arrays in, arrays out: attention, projections, norms, rotary positions, activations and the loss."""
