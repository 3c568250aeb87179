"""The worker: weights, KV tensors, forward pass, sampling."""
