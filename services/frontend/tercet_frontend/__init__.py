"""The front end: OpenAI-style HTTP in, token streams out."""
