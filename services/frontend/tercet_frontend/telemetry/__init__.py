"""What the front end tells of itself: numbers, spans, and what happens right now.

| file | what |
|---|---|
| `watch.py` | hears of one request; the null object where nobody does |
| `requests.py` | makes one for each request, and numbers and spans of what it hears |
| `generations.py` | a choice whose tokens are watched on their way |
| `metrics.py`, `fleet.py` | the instruments: of requests, and of cores, migrations and the registry |
| `live.py`, `percentiles.py` | the last minute, for a page that shows it |
"""
