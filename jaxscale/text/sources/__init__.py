"""Reading raw text of every kind, bounded in memory, each document with where it came from."""
