"""Run the command as ``python -m hicache_async.cli``."""

import sys

from . import main

sys.exit(main())
