"""``tercet bench serve``: load on a server, and what it answers."""
