"""Cost, time and memory of a run by arithmetic, from its config and a machine's name, without a compiler."""
