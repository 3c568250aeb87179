"""Which request computes how many tokens in which step: pure integer code, without a model, a worker or a clock."""
