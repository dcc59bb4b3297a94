"""What a run costs, takes and needs, from its config and a machine's name alone: seconds, no compiler, no device."""
