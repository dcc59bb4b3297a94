"""Matrix products: plain, grouped by expert, quantized, and the layouts that they need."""
