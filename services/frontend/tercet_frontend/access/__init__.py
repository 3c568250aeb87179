"""Who may call, how much, and what is noted of it: API keys, quotas, the connection's own limits, TLS and logs.

Nothing here knows what is asked for: an `Exchange` accompanies each HTTP request, and the rest of the front end tells
it what the request cost.
"""
