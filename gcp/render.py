"""Print a template with its `${NAMES}` filled in from the environment, without the lines for other kinds of machine.

`render.py FILE "tpu spot"`: a line that ends in `# only: WORD` stays if WORD is among those given.
"""

import os
import string
import sys
from pathlib import Path


def main() -> None:
    path, words = Path(sys.argv[1]), sys.argv[2].split()
    lines = (line.rpartition("  # only: ") for line in path.read_text(encoding="utf-8").splitlines())
    kept = [text if mark else only for text, mark, only in lines if not mark or only in words]
    sys.stdout.write(string.Template("\n".join(kept)).substitute(os.environ) + "\n")


if __name__ == "__main__":
    main()
