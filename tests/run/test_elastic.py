"""What a cluster can do without, as it is said before it joins; and who owns the checkpoints."""

from pathlib import Path

import pytest
from tiny import tiny_config

from maxlm.base.errors import ExitCode
from maxlm.cluster import progress_file
from maxlm.cluster.cluster import Cluster, ClusterPlace
from maxlm.cluster.coordinator import RendezvousError
from maxlm.cluster.environment import ProcessSpec
from maxlm.config import ConfigError
from maxlm.run.elastic import quorum_of, waiting_if_too_large, waiting_part
from maxlm.run.ownership import FILE, Ownership, SupersededRunError
from maxlm.training import fits

ELASTIC = {"min_hosts": 2, "wait_s": 60.0}


def asked(count=4, together=1, devices=2, hosts=True, process=0, **sections):
    """(quorum, lines said) of a process."""
    said = []
    names = tuple(f"host{number // together}" for number in range(count)) if hosts else ()
    spec = ProcessSpec(count, process, "host0:70", "a test", hosts=names, together=together)
    return quorum_of(tiny_config(**{"elastic": ELASTIC, **sections}), said.append, ClusterPlace(spec, devices)), said


def test_what_can_be_lost_is_said():
    quorum, said = asked(mesh={"data": 4, "fsdp": 2})
    assert said == ["elastic: can go on with 2 of 4 hosts after 60 s"]  # a batch of 16 is not split over 3
    assert quorum.going_on({0, 1, 3}) == (0, 1)
    assert quorum.going_on({1, 2, 3}) == ()
    assert quorum.wait_s == 60


def test_without_names_of_the_others_process_0_must_be_there():
    _, said = asked(mesh={"data": 4, "fsdp": 2}, hosts=False)
    assert said == [
        "elastic: can go on with 2 of 4 hosts after 60 s; process 0 must be there, since the names of the other hosts are not known "
        "(set MAXLM_HOSTS)"
    ]


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"together": 4, "mesh": {"data": 8, "fsdp": 1}}, "all processes are of one slice or node"),
        ({"devices": None}, "set cluster.topology"),
        ({"count": 3, "mesh": {"data": 8, "fsdp": 1}}, "8 devices are not split evenly over 3 hosts"),
        ({"count": 3, "mesh": {"data": 2, "slices": 2}}, "mesh.slices = 2 does not divide the 3 processes"),
    ],
)
def test_where_nothing_can_be_lost_it_is_said_and_all_wait(cluster, problem):
    quorum, said = asked(**cluster)
    assert quorum is None
    (line,) = said
    assert problem in line and line.endswith("so all hosts wait for one that is lost")


def test_a_mesh_without_a_smaller_one_is_noticed_at_once():
    _, said = asked(count=4, devices=1, mesh={"data": 1, "fsdp": 1, "tensor": 4})
    assert said == ["elastic: no mesh of fewer than 4 hosts keeps the global batch and a majority, so all wait for one that is lost"]


def test_more_hosts_than_there_are_cannot_be_demanded():
    with pytest.raises(ConfigError, match=r"elastic.min_hosts = 9: is more than the 4 hosts"):
        asked(mesh={"data": 4, "fsdp": 2}, elastic={"min_hosts": 9})


def test_a_node_is_one_host_however_many_processes_it_has():
    quorum, said = asked(count=8, together=2, devices=1, mesh={"data": 8, "fsdp": 1})
    assert quorum.min_processes == 4
    assert said == ["elastic: can go on with 2 of 4 groups of 2 processes after 60 s"]


def test_slices_are_lost_as_a_whole():
    quorum, _ = asked(count=8, together=2, devices=1, mesh={"data": 4, "fsdp": 2, "slices": 4})
    assert (quorum.together, quorum.min_processes) == (2, 2)
    assert quorum.going_on({0, 1, 2, 3, 4}) == (0, 1, 2, 3)


def test_those_that_were_absent_before_are_known(monkeypatch):
    monkeypatch.setattr(progress_file, "current", lambda: progress_file.Progress(absent_before=(1, 3)))
    quorum, _ = asked(mesh={"data": 4, "fsdp": 2})
    assert quorum.absent == {1, 3}


def test_waiting_is_a_change_of_hosts_from_the_second_start_of_an_elastic_run_on(monkeypatch):
    elastic, fixed = tiny_config(elastic=ELASTIC), tiny_config()
    assert [waiting_part(config.elastic) for config in (elastic, fixed)] == ["wait_hosts", "wait_hosts"]
    monkeypatch.setattr(progress_file, "current", lambda: progress_file.Progress(absent_before=()))
    assert [waiting_part(config.elastic) for config in (elastic, fixed)] == ["elastic", "wait_hosts"]


def test_a_smaller_mesh_that_is_too_small_makes_all_wait():
    """Exit code 6, with which the supervisor tries again, and not 2; with all hosts there the input is wrong."""
    too_large = fits.TooLargeError("training needs at least 2 GB of memory, and this machine has 1 GB.")
    with (
        pytest.raises(RendezvousError, match=r"elastic: without host1, training needs at least 2 GB"),
        waiting_if_too_large(Cluster("", ("host0",), 2, ("host1",))),
    ):
        raise too_large
    with pytest.raises(fits.TooLargeError), waiting_if_too_large(Cluster("", ("host0", "host1"), 2)):
        raise too_large


def test_only_the_last_start_owns_the_checkpoints(tmp_path):
    first = Ownership(folder := Path(tmp_path / "checkpoints"))
    first.check()
    second = Ownership(folder)
    second.check()
    with pytest.raises(SupersededRunError, match="another start of this run") as ended:
        first.check()
    assert ended.value.exit_code == ExitCode.HOST_LOST
    for text in ("", "[]", '{"token": 1}'):
        (folder / FILE).write_text(text)
        first.check()
