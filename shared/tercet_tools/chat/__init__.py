"""``tercet chat``: a conversation with a model from a terminal, or one question through a pipe."""
