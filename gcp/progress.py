"""Print the progress of a run in a line: `progress.py LATEST EVENTS`, the last lines of metrics.jsonl, and events.jsonl; both may be empty.

Goodput here is the share of all time since the first start, waiting for machines included, that went into updates that count.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from maxlm.telemetry.strict_json import read_objects


def progress(records: list[dict[str, Any]], events: list[dict[str, Any]], now: float) -> str:
    starts = [event for event in events if event.get("kind") == "start"]
    if not records:
        return "no step yet" if starts else "not started yet"
    last = records[-1]
    total = f" of {starts[-1]['total_steps']:,}" if starts and "total_steps" in starts[-1] else ""
    words = [f"step {last['step']:,}{total}", f"loss {last['loss']:.4g}" if last.get("loss") is not None else "loss not finite"]
    if last.get("tokens_per_s"):
        words.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    ended = events[-1]["time"] if events and events[-1].get("kind") == "stop" else now
    times = [record["step_time_s"] for record in records if record.get("step_time_s")]
    if starts and times and ended > starts[0]["time"]:
        useful = statistics.median(times) * (last["step"] - starts[0]["step"])
        words.append(f"goodput {min(1.0, useful / (ended - starts[0]['time'])):.1%}")
    if len(starts) > 1:
        words.append(f"started {len(starts)} times")
    return "  ".join(words)


if __name__ == "__main__":
    latest, events = ([item for item in read_objects(Path(name)) if item] for name in sys.argv[1:])
    print(progress(latest, events, time.time()))
