"""Who is alive, what each core has cached, and which core runs which request: in Redis, or static."""
