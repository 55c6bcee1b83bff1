"""``python -m engine.cli`` is ``peaksim``."""

import sys

from engine.cli.main import main

sys.exit(main())
