"""Attention over the paged KV cache: one interface, a backend per platform."""
