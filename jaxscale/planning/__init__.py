"""What a run costs, takes and needs, by arithmetic: from its config and a machine's name, without a compiler."""
