"""Parts of a Program that need the whole RunConfig: budget, dtypes, memory and checks."""
