"""Makes harness and fixtures importable from the tests of this folder."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from fixtures import *  # noqa: E402,F401,F403
