"""`python -m loopq`."""

import sys

from loopq.cli import main

sys.exit(main())
