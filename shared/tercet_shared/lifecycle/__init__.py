"""How a service process starts, reports to its supervisor, and stops."""
