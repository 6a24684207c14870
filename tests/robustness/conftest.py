"""The robustness suites share the server suites' harness and fixtures."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))

from fixtures import *  # noqa: E402,F401,F403
