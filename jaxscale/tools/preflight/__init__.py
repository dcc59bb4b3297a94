"""Compiles steps for devices that are not attached, and reports memory, time and communication."""
