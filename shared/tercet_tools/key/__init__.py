"""``tercet key``: makes API keys and their entries for the front end's list."""
