"""A neighbour that speaks jax's own protocol reaches the coordination service of a run at no port, and the run goes on."""

import re
import sys

import pytest
from hosts import Hosts, can_make_hosts
from small_run import environment

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")]

RUN = """
import sys
import jax, numpy
from jax.experimental import multihost_utils
from maxlm.runtime import cluster
jax.config.update("jax_cpu_collectives_implementation", "gloo")
named = {"coordinator": "host0:7000", "process_count": "2", "process_id": sys.argv[1]}
with cluster.joined(named, lambda text: None):
    for number in range(2):
        assert multihost_utils.process_allgather(numpy.array([int(sys.argv[1])])).tolist() == [[0], [1]]
        print("together", flush=True)
        sys.stdin.readline()
"""
STRANGER = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=1, cluster_detection_method="deactivate", initialization_timeout=4)
print("reached")
"""
LISTENS = re.compile(r"^ *\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:0000 0A", re.MULTILINE)


def test_nobody_else_reaches_jaxs_service(tmp_path):
    """On every port at which process 0 listens, and on those of the rendezvous: a client of jax as process 1, from another host."""
    with Hosts(tmp_path, 3) as hosts:

        def start(name, *arguments, **pipes):
            return hosts.start(name, [sys.executable, "-c", *arguments], env=environment(), stdout=-1, stderr=-1, **pipes)

        both = [start(f"host{number}", RUN, str(number), stdin=-1) for number in range(2)]
        for process in both:
            assert "together\n" in process.stdout, "gloo prints lines, too"
        show = "print(open('/proc/net/tcp').read() + open('/proc/net/tcp6').read())"
        listening = {int(port, 16) for port in LISTENS.findall(start("host0", show).communicate(timeout=30)[0])}
        assert not listening & {7000, 7001}
        for port in (7000, 7001, *listening):
            out, err = (stranger := start("host2", STRANGER, f"host0:{port}")).communicate(timeout=60)
            assert stranger.returncode != 0 and not out, (port, err)
        print(f"not reached at {sorted({7000, 7001, *listening})}")
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in both:
            assert "together\n" in process.stdout, "gloo prints lines, too"
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.wait(timeout=60) for process in both] == [0, 0], [process.communicate() for process in both]
