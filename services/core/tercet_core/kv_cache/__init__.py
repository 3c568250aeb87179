"""The paged KV cache's bookkeeping: which block is whose, and which blocks hold a known prefix."""
