"""Metrics, events, progress and health alerts of a run, its throughput, memory and versions. On the host, no jax."""
