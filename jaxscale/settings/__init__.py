"""Settings as files and flags: their parser, help, conditions, old names and leftovers."""
