"""Metrics, events, progress, health alerts, throughput, memory and versions of a run. On the host, without jax."""
