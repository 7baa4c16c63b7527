"""`loopq --register benches/zoo/register.py COMMAND` runs this, so that it can open the folders in
`weights/`, and `reproduce` also "fracast".

From Python in the repository's root, `import benches.zoo.register` does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benches.zoo.chains
import benches.zoo.forecaster
import benches.zoo.models  # noqa: F401  registers the classes
