"""Stands in for gcloud, kubectl, srun and others: records every word it is called with, and answers from a table.

STAND_IN names a folder. `calls` grows by a record a call: its words, and the files among them that are sent to the cloud. `answers` is
a table of rules, `match times code wait out err`; the first that fits answers (`match`: words that stand side by side in the call).
Records end with \\x1e, fields with \\x1f: it is started hundreds of times, and to import json takes longer than all it does.
Buckets are folders under `buckets/`, so that `gcloud storage` works; what else nobody has asked for succeeds in silence, except that
no machine exists.
"""

import fcntl
import os
import signal
import sys
import time

HOME = os.environ["STAND_IN"]
NAME, WORDS = os.path.basename(sys.argv[0]), sys.argv[1:]  # noqa: PTH119 -- pathlib, too, takes its time
SENT = ("--metadata-from-file=startup-script=", "--filename=")  # files whose contents are recorded


def main() -> int:
    with open(f"{HOME}/lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        rule = answer_of(f"{NAME} {' '.join(WORDS)}")
        files = [read(word[len(flag) :]) for word in WORDS for flag in SENT if word.startswith(flag)]
        with open(f"{HOME}/calls", "a") as calls:  # noqa: PTH123
            calls.write("\x1f".join(["".join(files), NAME, *WORDS]) + "\x1e")
    if rule is not None:
        return give(*rule)
    if WORDS[:1] == ["storage"]:
        return storage(WORDS[1:])
    if "describe" in WORDS or WORDS[:2] == ["get", "jobset"]:
        sys.stderr.write(f"ERROR: ({NAME}) NOT_FOUND: Resource was not found.\n")
        return 1
    return 0


def answer_of(call: str) -> list[str] | None:
    table = [record.split("\x1f") for record in read(f"{HOME}/answers").split("\x1e")[:-1]]
    for rule in table:
        if rule[0] in call and rule[1] != "0":
            rule[1] = str(int(rule[1]) - 1)
            write(f"{HOME}/answers", "".join("\x1f".join(one) + "\x1e" for one in table))
            return rule[2:]
    return None


def give(code: str, wait: str, out: str, err: str) -> int:
    """The answer; `wait`: stay so many seconds, and end with `code` when SIGTERM comes."""
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.stdout.flush()
    if float(wait):
        signal.signal(signal.SIGTERM, lambda number, frame: write(f"{HOME}/terminated", "") or sys.exit(int(code)))
        write(f"{HOME}/waiting", "")
        time.sleep(float(wait))
        return 99
    return int(code)


def storage(words: list[str]) -> int:
    verb, *rest = [word for word in words if not word.startswith("--")]
    source, target = local(rest[0]), local(rest[-1])
    if not os.path.exists(source) and source != "-":  # noqa: PTH110
        sys.stderr.write(f"ERROR: (gcloud.storage.{verb}) The following URLs matched no objects or files:\n{rest[0]}\n")
        return 1
    if verb == "cat":
        sys.stdout.write(read(source))
    elif verb == "cp":
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)  # noqa: PTH103, PTH120
        with open(target, "wb") as file:  # noqa: PTH123
            file.write(sys.stdin.buffer.read() if source == "-" else open(source, "rb").read())  # noqa: PTH123, SIM115
    elif verb == "rsync":
        import shutil

        shutil.copytree(source, target, dirs_exist_ok=True)
    return 0


def local(name: str) -> str:
    return f"{HOME}/buckets/{name[len('gs://') :]}" if name.startswith("gs://") else name


def read(path: str) -> str:
    if not os.path.exists(path):  # noqa: PTH110
        return ""
    with open(path) as file:  # noqa: PTH123
        return file.read()


def write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)


sys.exit(main())
