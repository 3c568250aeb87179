# ruff: noqa: D103, INP001, S310, S323, SLF001, T201  # a program that is given to `python -c`, and prints
"""What `helm test` runs: every model is listed, and answers a chat. Arguments: URL, seconds per answer, models."""

import json
import os
import ssl
import sys
import urllib.request

url, seconds, *models = sys.argv[1:]
# The certificate is for the name that clients use, not for the Service's; this only asks whether there are answers.
tls = ssl._create_unverified_context() if url.startswith("https:") else None
headers = {"Content-Type": "application/json"}
if "API_KEY" in os.environ:
    headers["Authorization"] = "Bearer " + os.environ["API_KEY"]


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=float(seconds), context=tls) as response:
        return json.load(response)


listed = {model["id"] for model in ask("/v1/models")["data"]}
print("listed:", *sorted(listed))
missing = [model for model in models if model not in listed]
if missing:
    sys.exit("not listed: " + " ".join(missing))
for model in models:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = ask("/v1/chat/completions", {"model": model, "max_tokens": 8, "messages": messages})
    tokens = answer["usage"]["completion_tokens"]
    if tokens < 1:
        sys.exit(f"{model} answered nothing")
    print(f"{model}: {tokens} tokens: {answer['choices'][0]['message']['content']!r}")
