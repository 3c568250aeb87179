"""The CUDA worker. It is imported where a GPU is used, and needs the extra ``cuda`` (Triton, FlashInfer)."""
