"""Settings in config files and flags: parsers, help, conditions, renamed and unread settings."""
