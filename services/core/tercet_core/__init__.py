"""The scheduler core: requests, scheduling, paged KV cache, links to workers."""
