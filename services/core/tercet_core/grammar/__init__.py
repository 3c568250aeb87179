"""Grammars: what a request's output may look like, compiled to masks over the vocabulary with llguidance."""
