"""Faults of the machine below a process: a wall clock that jumps, reads of the token store that fail, and reads or sends that never end.

A small library stands between the processes of a host and libc (LD_PRELOAD). It reads a page of memory that this program shares with it, so
each host has faults of its own, and maxlm runs unchanged. Needs a C compiler; what does not go through libc is not reached.
"""

import functools
import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CHAOS_CONTROL"
FORMAT = "<qiii"  # struct control
GOOD, FAIL, HANG = 0, 1, 2
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control { volatile int64_t clock_s; volatile int32_t reads, sends, delay_ms; };
static struct control none, *control = &none;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("CHAOS_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) control = page;
    close(file);
}

static void pause_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static int leads_to(int file, const char *part) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return strstr(path, part) != NULL;
}

static int refused(int file) {
    if (!control->reads && !control->delay_ms) return 0;
    if (!leads_to(file, "/store/train/tokens/c/")) return 0;
    pause_ms(control->delay_ms);
    while (control->reads == 2) pause_ms(10);
    if (control->reads == 1) errno = EIO;
    return control->reads == 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int file, void *to, size_t size) { return refused(file) ? -1 : REAL(read)(file, to, size); }
ssize_t pread(int file, void *to, size_t size, off_t at) { return refused(file) ? -1 : REAL(pread)(file, to, size, at); }
ssize_t pread64(int file, void *to, size_t size, off64_t at) { return refused(file) ? -1 : REAL(pread64)(file, to, size, at); }

/* A send that the kernel does not come to the end of, as to a card that takes nothing: to a socket that nobody reads. */
static void send_for_ever(const struct iovec *parts, int count) {
    int ends[2], size = 4096;
    struct timeval second = {1, 0};
    char bytes[4096] = {0};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return;
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    while (send(ends[0], bytes, sizeof bytes, MSG_DONTWAIT) > 0) {}
    setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
    while (control->sends == 2) REAL(writev)(ends[0], parts, count);
    close(ends[0]), close(ends[1]);
}

/* Of all that maxlm runs, only gloo sends with writev to a socket: these are the collectives between hosts. */
ssize_t writev(int file, const struct iovec *parts, int count) {
    if (control->sends == 2 && leads_to(file, "socket:")) send_for_ever(parts, count);
    return REAL(writev)(file, parts, count);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = REAL(clock_gettime);
    int end = real(which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += control->clock_s;
    return end;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec, now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""


@functools.cache
def compiler() -> str | None:
    """Path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build(folder: Path) -> Path:
    """Compile the library into `folder`; returns its path. Raises subprocess.CalledProcessError."""
    library = folder / "chaos_libc.so"
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-", "-ldl"]
    subprocess.run(command, input=SOURCE, text=True, check=True, capture_output=True)
    return library


class Machine:
    """Faults of one host, which its processes see at once."""

    def __init__(self, library: Path, page: Path) -> None:
        page.write_bytes(bytes(mmap.PAGESIZE))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library.absolute()), VARIABLE: str(page.absolute())}
        self._faults = {"clock_s": 0, "reads": GOOD, "sends": GOOD, "delay_ms": 0}

    def set(self, **faults: int) -> None:
        """Change some of: `clock_s`, seconds by which the wall clock is off; `reads` of training tokens: GOOD, FAIL or HANG; `sends` of
        collectives: GOOD or HANG; `delay_ms`, which every read of training tokens takes longer.
        """
        assert faults.keys() <= self._faults.keys(), faults
        self._faults |= faults
        self._page[: struct.calcsize(FORMAT)] = struct.pack(FORMAT, *self._faults.values())
