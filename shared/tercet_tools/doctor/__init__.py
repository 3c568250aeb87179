"""``tercet doctor``: what this machine offers, and what a model needs."""
