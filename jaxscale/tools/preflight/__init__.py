"""Memory, time and communication of steps compiled for devices that are not attached."""
