"""The faults that chaos injects: one entry of FAULTS each."""

import importlib.util
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos_libc import FAIL, HANG, compiler
from chaos_world import DISK_MB, SAVE_EVERY, World

PARTS = {  # part -> its module: faults that need it are run once it is there
    "watchdog": "maxlm.runtime.watchdog",
    "rollback": "maxlm.training.rollback",
    "tiers": "maxlm.checkpoint.tiers",
    "integrity": "maxlm.training.integrity",
    "elastic": "maxlm.runtime.elastic",
}
BRIEF_SECONDS = 2.0  # that a fault lasts which goes away by itself


@dataclass(frozen=True)
class Fault:
    """`inject` returns once the cause is gone; `named`: pattern of the line that names the culprit ({victim}: the host), "" if there is
    nothing to name.
    """

    name: str
    inject: Callable[[World], None]
    named: str
    needs: str = ""  # a key of PARTS
    least_hosts: int = 1
    disks: tuple[str, ...] = ()  # file systems of their own, see World
    least_step: int = SAVE_EVERY + 3  # at which it is injected, after a checkpoint
    either_end: bool = False  # of a link between two hosts: none can tell which of them is cut off

    def missing(self) -> str:
        """Reason that it cannot be run now, or ""."""
        if self.needs and importlib.util.find_spec(PARTS[self.needs]) is None:
            return f"needs {self.needs}, which is not there yet"
        return "" if compiler() else "needs a C compiler"


def kill_trainer(world: World) -> None:
    """kill -9."""
    world.signal(world.victim, signal.SIGKILL)


def kill_supervisor(world: World) -> None:
    """The trainer is left without its supervisor, and ends by itself; the scheduler starts the task again."""
    world.run.processes[world.victim].kill()
    world.restart_supervisor(world.victim)


def kill_host(world: World) -> None:
    """All processes of a host, as a reboot would; the scheduler starts the task again."""
    world.hosts.kill(world.victim)
    world.restart_supervisor(world.victim)


def stop_trainer(world: World) -> None:
    """SIGSTOP, for ever."""
    world.signal(world.victim, signal.SIGSTOP)


def cut_network(world: World) -> None:
    """Both directions, until all others have ended and tried to meet again."""
    world.hosts.cut(world.victim)
    _until_others_ended(world)
    world.hosts.mend(world.victim)


def cut_one_way(world: World) -> None:
    """What the victim sends is lost; what others send arrives."""
    world.hosts.mute(world.victim)
    _until_others_ended(world)
    world.hosts.unmute(world.victim)


def _until_others_ended(world: World) -> None:
    before = {name: world.trainer(name) for name in world.others}
    world.until(lambda: all(world.trainer(name) != pid for name, pid in before.items()), 120)
    time.sleep(3)


def slow_link(world: World) -> None:
    """What the victim sends goes at 1 Mbit/s."""
    world.hosts.slow_down(world.victim, "1mbit")
    _some_steps(world)
    world.hosts.speed_up(world.victim)


def slow_host(world: World) -> None:
    """The trainer has a tenth of its processor time."""
    until = time.monotonic() + 10 * BRIEF_SECONDS
    first = world.progress.step
    while time.monotonic() < until and world.progress.step < first + 20:
        world.signal(world.victim, signal.SIGSTOP)
        time.sleep(0.18)
        world.signal(world.victim, signal.SIGCONT)
        time.sleep(0.02)


def _some_steps(world: World) -> None:
    """Until two saves were due."""
    first = world.progress.step
    world.until(lambda: world.progress.step > first + 2 * SAVE_EVERY, 10 * BRIEF_SECONDS)


def hang_collective(world: World) -> None:
    """What the victim sends in collectives never leaves it, while its heartbeats do."""
    with world.hanging(sends=HANG):
        pass


def block_reader(world: World) -> None:
    """A read of training tokens does not end, until the process is another."""
    with world.hanging(reads=HANG):
        pass


def pause_reader(world: World) -> None:
    """The same for some seconds."""
    machine = world.machines[world.victim]
    machine.set(reads=HANG)
    time.sleep(3 * BRIEF_SECONDS)
    machine.set(reads=0)


def fail_reads(world: World) -> None:
    """Reads of training tokens fail with EIO."""
    machine = world.machines[world.victim]
    machine.set(reads=FAIL)
    time.sleep(BRIEF_SECONDS)
    machine.set(reads=0)


def fill_disk(world: World) -> None:
    """The disk of the run directory, checkpoints included, is full to the last byte for some seconds."""
    ballast = world.folder / "runs" / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for piece in (2**16, 1):
            try:
                for _ in range(DISK_MB * 2**20):
                    file.write(bytes(piece))
            except OSError:
                pass
        time.sleep(2 * BRIEF_SECONDS)
    ballast.unlink()


def protect_folder(world: World) -> None:
    """The folder of the checkpoints can only be read, at all hosts, while two saves are due."""
    folder = str(world.checkpoints())
    for name in world.hosts.names:
        world.run.within(name, "mount", "--bind", folder, folder)
        world.run.within(name, "mount", "-o", "remount,bind,ro", folder)
    _some_steps(world)
    for name in world.hosts.names:
        world.run.within(name, "umount", folder)


def damage_checkpoint(world: World) -> None:
    """A bit of the newest checkpoint flips, and the trainer is killed."""
    folder = world.checkpoints()
    newest = folder / str(max(int(one.name) for one in folder.iterdir() if one.name.isdigit()))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    bit = world.dice.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    largest.write_bytes(bytes(content))
    kill_trainer(world)


def jump_clock(world: World) -> None:
    """The wall clock of a host is an hour off, in either direction, from now on."""
    world.machines[world.victim].set(clock_s=world.dice.choice((-3600, 3600)))


def not_built(world: World) -> None:
    """Of a part that is not there yet."""
    raise NotImplementedError


LOST = r"lost: {victim} \(process"
KILLED = rf"({LOST}|the run was killed by SIGKILL)"
FAULTS = (
    Fault("kill_trainer", kill_trainer, KILLED),
    Fault("kill_supervisor", kill_supervisor, r"stopped by SIGTERM"),
    Fault("kill_host", kill_host, ""),
    Fault("stop_trainer", stop_trainer, rf"({LOST}|was stopped \(SIGSTOP\))"),
    Fault("cut_network", cut_network, LOST, least_hosts=2, either_end=True),
    Fault("cut_one_way", cut_one_way, LOST, least_hosts=2, either_end=True),
    Fault("slow_link", slow_link, r"slow.*{victim}", "watchdog", least_hosts=2),
    Fault("slow_host", slow_host, r"slow.*{victim}", "watchdog", least_hosts=2),
    Fault("hang_collective", hang_collective, r"{victim}", "watchdog", least_hosts=2),
    Fault("block_reader", block_reader, r"data", "watchdog"),
    Fault("pause_reader", pause_reader, ""),
    Fault("fail_reads", fail_reads, r"tokens failed and is tried again"),
    Fault("fill_disk", fill_disk, r"No space left on device", disks=("runs",)),
    Fault("protect_folder", protect_folder, r"Read-only file system"),
    Fault("damage_checkpoint", damage_checkpoint, r"checkpoint \d+ is damaged", least_step=2 * SAVE_EVERY + 3),
    Fault("jump_clock", jump_clock, ""),
    Fault("flip_bit", not_built, r"{victim}", "integrity"),
    Fault("nan_batch", not_built, r"", "rollback"),
    Fault("spike_batch", not_built, r"", "rollback"),
    Fault("tear_peer_copy", not_built, r"", "tiers", least_hosts=2),
    Fault("host_gone", not_built, r"{victim}", "elastic", least_hosts=2),
)
