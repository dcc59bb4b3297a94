"""A run in a work folder: options, resume checks, opening, services, startup log."""
