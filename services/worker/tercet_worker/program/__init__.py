"""A model's step as one call: its operations recorded once over fixed buffers, its weights packed for the kernels."""
