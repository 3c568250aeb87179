"""What clients send: one Pydantic model per endpoint, and the fields that are refused by name."""
