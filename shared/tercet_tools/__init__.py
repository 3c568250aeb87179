"""The tools of the ``tercet`` command; no service needs them."""
