"""Make the wall clock of programs jump, by a small library that is loaded before libc (LD_PRELOAD).

CLOCK_REALTIME, `gettimeofday` and `time` are a day ahead in one second and a day behind in the
next, by seconds of the monotonic clock, which is unchanged. It needs a C compiler (`cc`).
"""

from pathlib import Path

from bench.lib.preload import preloaded

# The library: its functions replace those of libc.
SOURCE = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec % 2 ? 86400 : -86400;
}

int clock_gettime(clockid_t which, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, which, time);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        time->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
"""


def jumping_clock(folder: Path) -> dict[str, str]:
    """Return the environment variables of a process whose wall clock jumps.

    Raises: OSError, subprocess.CalledProcessError: there is no working C compiler.
    """
    return preloaded(folder, "clock", SOURCE)
