"""Parts of a Program that need the whole RunConfig: budget, dtypes, checks, first state."""
