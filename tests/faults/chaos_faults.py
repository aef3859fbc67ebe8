"""The faults that chaos injects: one entry of FAULTS each."""

import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import bit_flips
from chaos_libc import FAIL, GOOD, HANG, compiler
from chaos_store import ALPHABET
from chaos_world import DISK_MB, SAVE_EVERY, STEPS, Shape, World

PARTS = {  # part -> its module: faults that need it are run once it is there
    "watchdog": "maxlm.supervision.watchdog",
    "health": "maxlm.training.rollback",
    "memory": "maxlm.checkpoint.memory",
    "integrity": "maxlm.training.integrity",
    "elastic": "maxlm.run.elastic",
}
BRIEF_SECONDS = 2.0  # that a fault lasts which goes away by itself
LONG_STEPS = 1200  # of a run in which a slow host is named: after three windows of 30 s
POISONED_AT, POISONED_STEPS = 120, 160  # first batch, and steps of the run: a spike is judged by the hundred losses before
BEFORE_POISON = POISONED_AT - 2 * SAVE_EVERY
ELASTIC = ("elastic={min_hosts: 2, wait_s: 20}", "train.global_batch=24")  # which three hosts divide as well as four
DEVICE_IDS = 2048  # of a process, on CPUs


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
    least_step: int = SAVE_EVERY + 3  # at which it is injected, after a checkpoint
    steps: int = STEPS
    poisoned: int = 0  # batches from POISONED_AT on that hold tokens which no other has
    hook: str = ""  # Python that every process runs when it starts
    disks: tuple[str, ...] = ()  # see Setup
    without: str = ""  # a part that would hide the fault
    prepare: Callable[[World], Mapping[str, str]] | None = None  # before the run starts; returns variables of its environment
    settings: tuple[str, ...] = ()  # of the run, beside those of all parts
    gone: bool = False  # the victim does not come back: the others end on a smaller mesh, whose losses agree to RTOL
    either_end: bool = False  # of a link between two hosts: none can tell which of them is cut off

    def missing(self) -> str:
        """Reason that it cannot be run now, or ""."""
        if self.needs and not there(self.needs):
            return f"needs {self.needs}, which is not there yet"
        return "" if compiler() else "needs a C compiler"


def there(part: str) -> bool:
    """True if a part is built."""
    return importlib.util.find_spec(PARTS[part]) is not None


def settings_of_parts(shape: Shape, folder: Path, without: str = "") -> tuple[str, ...]:
    """Settings of the parts that are there but for one, for a short run whose hosts' own memory is in `folder`."""
    found = {
        "watchdog": "watchdog={step_seconds: 20, data_seconds: 20, save_seconds: 60, startup_seconds: 300}",
        "health": "health={spike: roll_back, not_finite: roll_back}",
        "memory": f"memory_checkpoints={{every_steps: 1, folder: {folder}}}",
        "integrity": "integrity={every_steps: 5}" if shape.hosts > 1 else "",  # there must be copies
    }
    return tuple(setting for part, setting in found.items() if setting and part != without and there(part))


def kill_trainer(world: World) -> None:
    """kill -9."""
    world.signal(world.victim, signal.SIGKILL)


def kill_supervisor(world: World) -> None:
    """The trainer is left without its supervisor, and ends by itself; the scheduler starts the task again."""
    world.run.processes[world.victim].kill()
    world.restart_supervisor(world.victim)


def kill_host(world: World) -> None:
    """All processes of a host, and what is in its memory, as a reboot would; the scheduler starts the task again."""
    world.hosts.kill_all(world.victim)
    for path in world.hosts.own(world.victim).iterdir():
        shutil.rmtree(path)
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
    """Messages from the victim are lost; those to it arrive."""
    world.hosts.mute(world.victim)
    _until_others_ended(world)
    world.hosts.unmute(world.victim)


def _until_others_ended(world: World) -> None:
    before = {name: world.trainer(name) for name in world.others}
    world.until(lambda: all(world.trainer(name) != pid for name, pid in before.items()), 120)
    time.sleep(3)


def slow_link(world: World) -> None:
    """The victim sends at 1 Mbit/s."""
    world.hosts.slow_down(world.victim, "1mbit")
    _some_steps(world)
    world.hosts.speed_up(world.victim)


def slow_host(world: World) -> None:
    """The trainer has a tenth of its processor time, while two saves are due."""
    _slow_down(world, world.progress.step + 2 * SAVE_EVERY, 10 * BRIEF_SECONDS)


def slow_host_for_long(world: World) -> None:
    """The same, until nearly the end."""
    _slow_down(world, LONG_STEPS - 50, 300)


def _slow_down(world: World, step: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and world.progress.step < step:
        world.signal(world.victim, signal.SIGSTOP)
        time.sleep(0.18)
        world.signal(world.victim, signal.SIGCONT)
        time.sleep(0.02)


def _some_steps(world: World) -> None:
    """Until two saves were due."""
    first = world.progress.step
    world.until(lambda: world.progress.step > first + 2 * SAVE_EVERY, 10 * BRIEF_SECONDS)


def hang_collective(world: World) -> None:
    """Messages of collectives never leave the victim, while its heartbeats do."""
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
    machine.set(reads=GOOD)


def fail_reads(world: World) -> None:
    """Reads of training tokens fail with EIO."""
    machine = world.machines[world.victim]
    machine.set(reads=FAIL)
    time.sleep(BRIEF_SECONDS)
    machine.set(reads=GOOD)


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


def flood(world: World) -> None:
    """A neighbour opens hundreds of connections to every port of the victim, and sends garbage, huge lines, or a byte at a time."""
    pid = world.trainer(world.victim)
    ports = [] if pid is None else listening(pid)
    address = f"10.77.0.{world.hosts.names.index(world.victim) + 1}"
    sender = world.hosts.start(world.others[0], [sys.executable, "-c", STRANGERS, address, *map(str, ports)])
    sender.wait(120)


def listening(pid: int) -> list[int]:
    """TCP ports at which a host listens, seen from one of its processes."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return sorted({int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"})


def flip_bit(world: World) -> Mapping[str, str]:
    """Have a bit of a device of the victim flip in a parameter, just after the trial's step."""
    device = DEVICE_IDS * world.hosts.names.index(world.victim) + world.dice.randrange(world.shape.devices)
    place = {"element": world.dice.randrange(32), "bit": world.dice.randrange(30)}
    flip = {"step": 3 * SAVE_EVERY + 3 + world.dice.randrange(SAVE_EVERY), "leaf": "params.final_norm.scale_D", "device": device, **place}
    return bit_flips.environment(world.folder / "flips", bit_flips.Flip(**flip))


def tear_copy(world: World) -> None:
    """The newest copy in the victim's memory is cut short, and its trainer is killed."""
    stop_trainer(world)  # else it may make another copy in between
    copies = list(world.hosts.own(world.victim).rglob("[0-9]*-[0-9]*/data"))  # complete ones: drafts have other names
    newest = max(copies, key=lambda path: path.stat().st_mtime)
    with newest.open("r+b") as file:
        file.truncate(world.dice.randrange(newest.stat().st_size))
    kill_trainer(world)


def wait(world: World) -> None:
    """Poisoned batches, bits that flip: it happens in the run itself."""


def host_gone(world: World) -> None:
    """All processes of a host end, and it never comes back: the others go on without it."""
    world.hosts.kill_all(world.victim)


# Weights that are not finite, in every row with a token that only poison has.
NAN_ROWS = f"""
import sys
if "train" in sys.orig_argv and "launch" not in sys.orig_argv:
    import numpy as np
    from maxlm.data.input_pipeline import Pipeline
    whole = Pipeline._batch
    def with_nan(self, samples):
        batch = whole(self, samples)
        bad = (np.asarray(batch.tokens_BS) > {ALPHABET}).any(axis=1, keepdims=True)
        return batch._replace(weights_BS=np.where(bad, np.float32("nan"), batch.weights_BS))
    Pipeline._batch = with_nan
"""
STRANGERS = """
import random, socket, sys, time
dice, opened = random.Random(0), 0
for number in range(100):
    for port in map(int, sys.argv[2:]):
        try:
            with socket.create_connection((sys.argv[1], port), timeout=2) as one:
                opened += 1
                one.settimeout(0.2)
                kind = number % 5
                if kind == 0:
                    one.sendall(dice.randbytes(dice.randrange(1, 20_000)))
                elif kind == 1:
                    one.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                elif kind == 2:
                    one.sendall(b"[" * 200_000 + b"\\n")
                elif kind == 3:
                    for byte in b"PRI * HTTP/2.0":
                        one.sendall(bytes([byte]))
                        time.sleep(0.002)
                one.recv(100)
        except OSError:
            pass
print("strangers:", opened, "connections to ports", *sys.argv[2:], flush=True)
"""
LOST = r"lost: {victim} \(process"
HUNG = r"hung: {victim} \(process"
ROLLED_BACK = r'"kind": ?"rollback"'
FAULTS = (
    Fault("kill_trainer", kill_trainer, rf"({LOST}|the run was killed by SIGKILL)"),
    Fault("kill_supervisor", kill_supervisor, r"stopped by SIGTERM"),
    Fault("kill_host", kill_host, LOST),
    Fault("stop_trainer", stop_trainer, rf"({LOST}|was stopped \(SIGSTOP\))"),
    Fault("cut_network", cut_network, LOST, least_hosts=2, either_end=True),
    Fault("cut_one_way", cut_one_way, LOST, least_hosts=2, either_end=True),
    Fault("slow_link", slow_link, "", least_hosts=2),
    Fault("slow_host", slow_host, "", least_hosts=2),
    Fault("slow_host_for_long", slow_host_for_long, r"slow_host.*{victim}", "watchdog", least_hosts=2, steps=LONG_STEPS),
    Fault("hang_collective", hang_collective, HUNG, "watchdog", least_hosts=2),
    Fault("block_reader", block_reader, r"hung: ({victim} \(process \d\) is )?in (the wait|waiting) for data", "watchdog"),
    Fault("pause_reader", pause_reader, ""),
    Fault("fail_reads", fail_reads, r"tokens failed and is tried again"),
    Fault("fill_disk", fill_disk, r"No space left on device", disks=("runs",)),
    Fault("protect_folder", protect_folder, r"Read-only file system"),
    Fault("damage_checkpoint", damage_checkpoint, r"checkpoint \d+ is damaged", least_step=2 * SAVE_EVERY + 3, without="memory"),
    Fault("jump_clock", jump_clock, ""),
    Fault("flood", flood, "", least_hosts=2),
    Fault("flip_bit", wait, r'"corrupted".*"hosts": ?\["{victim}"\]', "integrity", least_hosts=2, prepare=flip_bit),
    Fault("nan_batch", wait, ROLLED_BACK, "health", least_step=BEFORE_POISON, steps=POISONED_STEPS, poisoned=12, hook=NAN_ROWS),
    Fault("spike_batch", wait, ROLLED_BACK, "health", least_step=BEFORE_POISON, steps=POISONED_STEPS, poisoned=5),
    Fault("tear_copy", tear_copy, r"cop(y|ies) .*(damaged|not used)", "memory"),
    Fault("host_gone", host_gone, r"without {victim}", "elastic", least_hosts=3, settings=ELASTIC, gone=True),
)
