"""Pages and numbers of the documentation that are made of the code."""
