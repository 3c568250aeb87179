"""``python -m tercet_tools.bench serve …``: the command without the rest of ``tercet``."""

import sys

from tercet_tools.bench.command import main

sys.exit(main(sys.argv[1:]))
