"""The device mesh, the rule tables, and how arrays are placed by them."""
