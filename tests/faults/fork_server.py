"""Python processes that begin with jax and maxlm imported: to import them takes 3 s of CPU time, of each process that a test starts.

`Popen` and `run` are as those of `subprocess`, for commands `[sys.executable, "-m", "maxlm", ...]`, `[sys.executable, "-c", ...]` and
`[sys.executable, "FILE.py", ...]`. A server process, which has imported and done nothing else, forks twice; the pytest process adopts the
grandchild (as a subreaper, see prctl(2)): it is waited for, signalled and counted as any child. Commands and options that the server cannot
honour, and variables that are read on import, start a new interpreter. Tests of how a process begins use `subprocess`.
"""

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

PRELOADED = ("maxlm.cli", "maxlm.run.run", "maxlm.inference.text", "optax", "jax.experimental.multihost_utils")
READ_ON_IMPORT = ("JAX_", "PYTHON", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "TPU_", "CUDA_", "GRPC_", "TF_", "LIBTPU_")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MOST_FDS = 16


def _read_on_import(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_ON_IMPORT)}


def _is_program(args: list[str]) -> bool:
    return args[0] == sys.executable and len(args) > 1 and args[1].endswith(".py")


class _Server:
    """The server of this process, and what its variables were when it began."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        self.environ = _read_on_import(dict(os.environ))
        with there:
            self._process = subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=(there.fileno(),))
        self._set_subreaper = ctypes.CDLL(None, use_errno=True).prctl

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Return the pid of a new child of this process that does `request`, with `fds` in the places `request["fds"]`."""
        self._set_subreaper(_SUBREAPER, 1, 0, 0, 0)
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self._here, [len(data).to_bytes(4, "big")], fds)
            self._here.sendall(data)
            pid = int.from_bytes(_exactly(self._here, 4), "big")
        finally:
            self._set_subreaper(_SUBREAPER, 0, 0, 0, 0)
        return pid


@functools.cache
def _server(pid: int) -> _Server:
    return _Server()


class Popen(subprocess.Popen):
    """`subprocess.Popen`, forked from the server where it can be."""

    def _execute_child(self, *given: Any) -> None:
        names = (
            "args executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite c2pread c2pwrite "
            "errread errwrite restore_signals gid gids uid umask start_new_session process_group"
        )
        how = dict(zip(names.split(), given, strict=True))
        environ = dict(os.environ if how["env"] is None else how["env"])
        args = [os.fsdecode(word) for word in how["args"]]
        plain = (
            sys.platform == "linux"
            and not isinstance(how["args"], str)
            and (args[:3] == [sys.executable, "-m", "maxlm"] or args[:2] == [sys.executable, "-c"] or _is_program(args))
            and all(how[name] is None for name in ("executable", "preexec_fn", "gid", "gids", "uid"))
            and how["umask"] == -1
            and not how["shell"]
            and _read_on_import(environ) == (server := _server(os.getpid())).environ
        )
        if not plain:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [fd if fd != -1 else number for number, fd in enumerate((how["p2cread"], how["c2pwrite"], how["errwrite"]))]
        request = {
            "args": args[1:],
            "cwd": str(Path.cwd() if how["cwd"] is None else Path(os.fsdecode(how["cwd"])).absolute()),
            "environ": environ,
            "fds": [0, 1, 2, *how["pass_fds"]],
            "session": how["start_new_session"],
            "group": how["process_group"],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "parent": os.getpid(),
        }
        self.pid = server.fork(request, [*ends, *how["pass_fds"]])
        self._child_created = True
        for ours, theirs in ((how["p2cwrite"], how["p2cread"]), (how["c2pread"], how["c2pwrite"]), (how["errread"], how["errwrite"])):
            if theirs != -1 and (ours != -1 or theirs == getattr(self, "_devnull", None)):
                with contextlib.suppress(OSError):
                    os.close(theirs)


# `subprocess.run` with the class above in place of its own.
run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen}, "run")
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise EOFError("the other end of the fork server is gone")
        data += more
    return data


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for every request. Returns in the forked process, with what it is to do; the server ends with the pytest process."""
    while True:
        try:
            size, fds, _, _ = socket.recv_fds(connection, 4, _MOST_FDS)
            request = json.loads(_exactly(connection, int.from_bytes(size, "big") or 1))
        except (EOFError, ConnectionError):
            os._exit(0)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                for end in (read, write):
                    os.close(end)
                connection.close()
                while os.getppid() != request["parent"]:  # until the process between has ended
                    time.sleep(0.0005)
                _take_place(request, fds)
                return request
            os.write(write, array.array("I", [pid]).tobytes())
            os._exit(0)
        os.waitpid(between, 0)
        pid = array.array("I", os.read(read, 4))[0]
        for fd in (read, write, *fds):
            os.close(fd)
        connection.sendall(pid.to_bytes(4, "big"))


def _take_place(request: dict[str, Any], fds: list[int]) -> None:
    """Folder, environment, session, blocked signals and open files of the process that was asked for."""
    if request["session"]:
        os.setsid()
    if request["group"] != -1:
        os.setpgid(0, request["group"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]
    for fd, place in zip(moved, request["fds"], strict=True):
        os.dup2(fd, place)
    kept = sorted(request["fds"])
    for low, high in zip(kept, [*kept[1:], 1024], strict=True):
        os.closerange(low + 1, high)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # anew: a file object remembers which kind of file it had
        old = getattr(sys, name)
        how = {"errors": old.errors, "line_buffering": number == 2 or os.isatty(number), "write_through": old.write_through}
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115  # for as long as the process lives
        setattr(sys, name, io.TextIOWrapper(raw, encoding=old.encoding, **how))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _become(request: dict[str, Any]) -> None:
    """Run a module, a text or a file as `python -m`, `python -c` and `python FILE.py` do."""
    how, *rest = request["args"]
    what = rest.pop(0) if how in ("-m", "-c") else str(Path(how).absolute())
    sys.path[0] = {"-m": request["cwd"], "-c": ""}.get(how, str(Path(what).parent))
    sys.argv = [how, *rest]
    code: object = None
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif how != "-c":
            runpy.run_path(what, run_name="__main__")
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)  # as python -c
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        with contextlib.suppress(OSError):
            _end(code or 0)
    raise SystemExit(code)


def _end(code: int) -> None:
    """End as an interpreter does, but for freeing what the server has imported, which takes 0.25 s of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as to_pytest:
        task = _serve(to_pytest)
    _become(task)
