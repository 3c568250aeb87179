"""``python fetch_model.py MODEL [REVISION]``: brings a model into the cache of the hub, or checks that it is on disk.

One container does this before the services start. They then read the cache without writing to it and without a way
out to the internet, and the model is downloaded once, whoever shares the volume.
"""

import sys

from tercet_shared.checkpoint import resolve
from tercet_shared.errors import CheckpointError


def main(arguments: list[str]) -> int:
    """Fetches what ``arguments`` name; returns the exit code. An empty revision is that of the model's main branch."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: fetch_model.py MODEL [REVISION]\n")
        return 2
    model, revision = arguments[0], (arguments[1] if len(arguments) == 2 else "")
    try:
        source = resolve(model, revision=revision or None)
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{model} is at {source.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
