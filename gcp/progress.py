"""Print the progress of a run in a line: `progress.py FOLDER`, a run directory, whose metrics.jsonl may be cut to its last lines.

Goodput is the share of all time since the first start, waiting for machines included, that went into steps that count; what took most of
the rest follows it (docs/explanation/ledger.md).
"""

import sys
import time
from pathlib import Path

from maxlm.base.strict_json import read_objects
from maxlm.telemetry.formatting import percent
from maxlm.telemetry.ledger import TITLES, read_ledger
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.unhealthy_hosts import to_replace

NAMED = 3  # parts beside the steps that count


def progress(run: RunDirectory, now: float) -> str:
    records = [item for item in read_objects(run.metrics) if item] if run.metrics.is_file() else []
    events = list(read_objects(run.events)) if run.events.is_file() else []
    starts = [event for event in events if event.get("kind") == "start"]
    if not records:
        return "no step yet" if starts else "not started yet"
    last = records[-1]
    total = f" of {starts[-1]['total_steps']:,}" if starts and "total_steps" in starts[-1] else ""
    words = [f"step {last['step']:,}{total}", f"loss {last['loss']:.4g}" if last.get("loss") is not None else "loss not finite"]
    if last.get("tokens_per_s"):
        words.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    ledger = read_ledger(run, now)
    if ledger.wall_s:
        rest = sorted(((value / ledger.wall_s, part) for part, value in ledger.seconds.items() if part != "step"), reverse=True)
        named = [f"{TITLES[part]} {percent(share)}" for share, part in rest[:NAMED] if share >= 0.001]
        words.append(f"goodput {percent(ledger.goodput)}" + (f" ({', '.join(named)})" if named else ""))
    if len(starts) > 1:
        words.append(f"started {len(starts)} times")
    words += [f"replace host {host}" for host in to_replace(run)]
    return "  ".join(words)


if __name__ == "__main__":
    print(progress(RunDirectory(Path(sys.argv[1]), primary=False), time.time()))
