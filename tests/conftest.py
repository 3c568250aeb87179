"""Settings that hold for all tests."""

import os

from hypothesis import settings

# Before torch is imported: OpenMP reads it when it is loaded. Threads that spin while they wait slow down everything on
# a machine with few processors, and the services that tests start compute beside the reference.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Everywhere as in CI: the same examples in every run, whatever time each takes. --hypothesis-profile=default looks on.
settings.load_profile("ci")
