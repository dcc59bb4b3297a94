"""Multi-process runs: process discovery, agreement between processes, and watchdogs."""
