"""`python -m maxlm.reference [FOLDER]`: write the generated pages into a folder (docs/reference/), and print the files that changed."""

import sys
from pathlib import Path

from maxlm.reference.pages import write

for changed in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference")):
    sys.stdout.write(f"{changed}\n")
