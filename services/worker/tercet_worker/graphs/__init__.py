"""Steps as recordings: a model's operations once, cut at attention; which steps are replayed, and at which size."""
