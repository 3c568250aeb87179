"""``python -m tercet_frontend MODEL --core ADDRESS``."""

import sys

from tercet_frontend.server import serve
from tercet_shared.config import FrontendSettings
from tercet_shared.lifecycle.service import run_service

sys.exit(run_service(FrontendSettings, serve))
