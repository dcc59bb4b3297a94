"""What a run says of itself: metrics, console, throughput, memory, versions. Host side, plain numbers in, no jax."""
