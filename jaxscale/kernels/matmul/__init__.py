"""Matrix products, plain, grouped by expert and quantized, with the layouts that they need."""
