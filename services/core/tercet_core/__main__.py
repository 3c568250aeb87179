"""``python -m tercet_core``: the core as a process."""

import sys

from tercet_core.core import serve
from tercet_shared.config import CoreSettings
from tercet_shared.lifecycle.service import run_service

if __name__ == "__main__":
    sys.exit(run_service(CoreSettings, serve))
