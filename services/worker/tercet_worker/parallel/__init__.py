"""Several processes that compute one model together: who holds what, how they meet, and how they talk."""
