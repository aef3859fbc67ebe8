"""Reduce the trace of a folder, in a process of its own, so that training neither waits for it nor shares its memory:
`python -m maxlm.telemetry.profile FOLDER FACTS`, FACTS the fields of `Facts` as JSON. Prints a JSON object."""

import json
import os
import sys
from pathlib import Path

from maxlm.base.errors import UserError
from maxlm.telemetry.profile import PAGE, TRACE, Facts, reduce_trace


def main() -> None:
    """Reduce the trace, and print where its page is or why there is none."""
    folder, facts = Path(sys.argv[1]), Facts(**json.loads(sys.argv[2]))
    os.nice(10)
    try:
        profile = reduce_trace(folder / TRACE, folder, facts)
        answer = {"page": str(folder / PAGE), "attributed": profile.attributed}
    except UserError as error:
        answer = {"reason": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
