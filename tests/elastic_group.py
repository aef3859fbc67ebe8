"""A cluster of processes that only join: a "run" lasts until it is to join anew or another is lost. No jax, so that it is fast."""

import json
import os
import signal
import subprocess
import sys
import time

from small_run import environment, free_port

from maxlm.cluster.message_socket import SECRET

# Joins as the next process would, again and again: its "run" ends when it is to join anew, or when another process is lost (code 6).
PROGRAM = """
import json, os, sys, time
from maxlm.base.errors import UserError
from maxlm.cluster import coordinator, message_socket, process_group, rendezvous
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.quorum import Quorum
process, port, hosts, wait_s, together = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4]), int(sys.argv[5])
coordinator.SETTLE_SECONDS, coordinator.POLL_SECONDS, rendezvous.PAUSE_SECONDS = 3.0, 0.2, 0.2
rendezvous.FOUND_SECONDS, rendezvous.PING_SECONDS, coordinator.SIGN_SECONDS = 2.25, 0.3, 0.75  # in the proportions of the product
process_group.SETTLE_SECONDS = 0.2
if "HEARTBEAT_TIMEOUT_SECONDS" in os.environ:
    process_group.HEARTBEAT_SECONDS, process_group.HEARTBEAT_TIMEOUT_SECONDS = 0.5, float(os.environ["HEARTBEAT_TIMEOUT_SECONDS"])
message_socket.KEEPALIVE_SECONDS = 6
spec = ProcessSpec(len(hosts), process, f"{hosts[0]}:{port}", "a test", hosts=tuple(hosts))
quorum = Quorum(len(hosts), together, 1, lambda units: True, wait_s, grow_after_s=1.0, digest=os.environ.get("DIGEST", ""))
say = lambda text: print(json.dumps({"said": text, "at": time.time()}), flush=True)
try:
    group = rendezvous.join(spec, 60, message_socket.shared_secret(os.environ), say, quorum)
except UserError as error:
    say(str(error))
    sys.exit(error.exit_code)
facts = {"numbers": group.configured, "process": group.spec.process, "address": group.spec.address, "at": time.time()}
print(json.dumps(facts), flush=True)
if group.returning is not None:
    group.returning.when_larger(lambda numbers: group.regroup(f"larger: {numbers}"))
began = time.monotonic()
while not group.regrouping and not os.path.exists("done"):
    time.sleep(0.05)
if not group.regrouping and group.returning is not None:
    group.returning.close()
group.leave()
time.sleep(0.3)
sys.exit(0 if not group.regrouping else 7)
"""
AGAIN = 'while true; do "$@"; code=$?; case $code in 6 | 7) ;; *) exit $code ;; esac; done'  # as the supervisor does, at once


class Cluster:
    """Processes on loopback addresses of their own, or on `hosts`, each started again when its run ends."""

    def __init__(self, folder, count, wait_s=3.0, hosts=None, together=1):
        self.folder, self.port, self.how, self.namespaces = folder, free_port(), (str(wait_s), str(together)), hosts
        self.hosts = [f"127.0.0.{number + 1}" for number in range(count)] if hosts is None else hosts.names
        self.running = {}

    def start(self, *numbers, **extra):
        for number in numbers:
            program = [sys.executable, "-c", PROGRAM, str(number), str(self.port), ",".join(self.hosts), *self.how]
            with self._log(number).open("a") as log:
                how = {"env": environment(**{SECRET: "a secret of the tests", **extra}), "stdout": log, "stderr": log, "cwd": self.folder}
                command, how["start_new_session"] = ["sh", "-c", AGAIN, "sh", *program], True
                if self.namespaces is None:
                    self.running[number] = subprocess.Popen(command, **how)
                else:
                    self.running[number] = self.namespaces.start(self.hosts[number], command, **how)

    def kill(self, number, how=signal.SIGKILL):
        os.killpg(self.running[number].pid, how)
        if how == signal.SIGKILL:
            self.running.pop(number).wait()

    def joined(self, number):
        """All that a process has joined: numbers, its place, the coordinator's address, the time."""
        return [one for one in self._lines(number) if "numbers" in one]

    def said(self, number):
        return " ".join(one["said"] for one in self._lines(number) if "said" in one)

    def wait(self, numbers, since=0.0, seconds=90):
        """Until these, in this order, and no others, are a group formed after `since`; returns the time when the last one had joined."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            last = [(self.joined(number) or [{"numbers": [], "at": 0}])[-1] for number in numbers]
            if all(one["numbers"] == list(numbers) and one["at"] > since for one in last):
                assert [one["process"] for one in last] == list(range(len(numbers)))
                assert len({one["address"] for one in last}) == 1
                return max(one["at"] for one in last)
            time.sleep(0.05)
        raise AssertionError({number: self._log(number).read_text() for number in range(len(self.hosts)) if self._log(number).exists()})

    def _log(self, number):
        return self.folder / f"{number}.log"

    def _lines(self, number):
        lines = self._log(number).read_text().splitlines() if self._log(number).exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]
