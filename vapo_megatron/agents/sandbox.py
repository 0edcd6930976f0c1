"""A boundary in the kernel for a process that runs code nobody has read: Landlock and seccomp.

Landlock (Linux 5.13 and later) lets the process read its libraries and write its own folder, and
nothing else. A seccomp filter refuses what Landlock does not see: new processes, sockets, signals
to others, limits and priorities, other processes' memory, owners and modes of files. Both hold for
whatever the process loads or executes afterwards, and neither can be taken back.

The filter is written out here because the libraries for it (libseccomp, pyseccomp) need a package
of the system that the compute nodes of a cluster often lack.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from vapo_megatron.errors import BadInput

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

# Landlock's system calls and rights (linux/landlock.h). A version of its interface adds rights.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_DIR = 1 << 7
_MAKE_REG = 1 << 8
_MAKE_FIFO = 1 << 10
_MAKE_SYM = 1 << 12
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_RIGHTS_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
_READ_AND_WRITE = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_TCP = 0b11  # binding and connecting, from version 4
_SCOPES = 0b11  # abstract sockets and signals, from version 6

# What an interpreter with NumPy reads besides its own files.
_SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
    "/dev/urandom",
    "/dev/zero",
)

# System calls of x86-64 that are refused whatever their arguments.
_REFUSED = {
    "socket": 41,
    "socketpair": 53,
    "fork": 57,
    "vfork": 58,
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "utime": 132,
    "personality": 135,
    "setpriority": 141,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "pivot_root": 155,
    "setrlimit": 160,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "tkill": 200,
    "sched_setaffinity": 203,
    "utimes": 235,
    "mbind": 237,
    "set_mempolicy": 238,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "migrate_pages": 256,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "unshare": 272,
    "move_pages": 279,
    "utimensat": 280,
    "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_settime": 227,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "sched_setattr": 314,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
    "fchmodat2": 452,
}
_TRUNCATE_CALL = 76  # by path; Landlock sees it from version 3
_CLONE = 56
_CLONE3 = 435
_KILL = 62
_TGKILL = 234
_PRCTL = 157
_PRLIMIT = 302
_CLONE_THREAD = 0x10000
_PRCTL_REFUSED = (1, 36)  # the signal at the parent's death; adopting orphans

# Classic BPF (linux/filter.h, linux/seccomp.h, linux/audit.h).
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_X86_64 = 0xC000003E
_FIRST_OF_X32 = 0x40000000
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_SECCOMP_ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")  # kernels with filters have it


class NoBoundary(BadInput):
    """The kernel of this machine cannot confine a process."""


@cache
def check_boundary() -> int:
    """The version of Landlock's interface here.

    Raises:
        NoBoundary: the kernel lacks Landlock or seccomp; the message says what helps.
    """
    if platform.machine() != "x86_64":
        raise NoBoundary(f"running code needs Linux on x86-64, this is {platform.machine()}")
    version = _libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    if version < 1:
        reason = os.strerror(ctypes.get_errno())
        raise NoBoundary(
            f"running code needs Landlock, and the kernel {platform.release()} has none "
            f"({reason}): use Linux 5.13 or later with `landlock` in /sys/kernel/security/lsm "
            "(kernel parameter lsm=landlock,...; a container's seccomp profile must allow it), or "
            "run code in a container"
        )
    if not _SECCOMP_ACTIONS.exists():
        raise NoBoundary(
            f"running code needs seccomp, and the kernel {platform.release()} has none: use one "
            "built with CONFIG_SECCOMP_FILTER, or run code in a separate container"
        )
    return int(version)


@cache
def library_folders() -> tuple[str, ...]:
    """Folders of Python's own modules and of installed packages."""
    installed = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return tuple(dict.fromkeys(os.path.realpath(path) for path in (*standard, *installed)))


def boundary(folder: str, limits: Sequence[tuple[int, int]] = ()) -> Callable[[], None]:
    """A function that confines the process which calls it, for `preexec_fn`.

    Args:
        folder: the only place where the process may write.
        limits: resources (resource.RLIMIT_*) and how much of each the process may have. They are
            set as late as can be: until it executes something else, the process still has the
            memory and the open files of the one that it was forked from, which may be more.

    Raises:
        NoBoundary: this machine cannot.
    """
    version = check_boundary()
    interpreter = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    readable = (*_SYSTEM_FILES, *library_folders(), f"{prefix}/lib", interpreter)

    def confine() -> None:
        ruleset = _new_ruleset(version)
        _allow_paths(ruleset, readable, _READ, version)
        # The dynamic loader is executed with the interpreter.
        _allow_paths(ruleset, (interpreter, *_loaders()), _EXECUTE | _READ_FILE, version)
        _allow_paths(ruleset, ("/dev/null",), _READ_FILE | _WRITE_FILE, version)
        _allow_paths(ruleset, (folder,), _READ_AND_WRITE, version)
        instructions = seccomp_filter(os.getpid(), version)
        program = _Program(len(instructions) // 8, instructions)
        filtered = ctypes.byref(program)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
        os.close(ruleset)
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))
        # The filter refuses to set limits.
        _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filtered, 0, 0))

    return confine


def _loaders() -> tuple[str, ...]:
    return ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-x86-64.so.2")


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _new_ruleset(version: int) -> int:
    rights = (1 << 13) - 1
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    if version >= 5:
        rights |= 1 << 15  # ioctl on devices
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    return _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))


def _allow_paths(ruleset: int, paths: Iterable[str], rights: int, version: int) -> None:
    if version < 2:
        rights &= ~_REFER
    if version < 3:
        rights &= ~_TRUNCATE
    for path in paths:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = rights if os.path.isdir(path) else rights & _RIGHTS_OF_FILES
        rule = struct.pack("=Qi", allowed, place)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(place)


def seccomp_filter(pid: int, landlock_version: int) -> bytes:
    """The filter's program. pid: the process that is confined, which may send signals to itself."""
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)

    def low_word(argument: int) -> bytes:
        return _instruction(_LOAD, 16 + 8 * argument)

    def high_word(argument: int) -> bytes:
        return _instruction(_LOAD, 20 + 8 * argument)

    program = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_JUMP_EQUAL, _X86_64, skip_if_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_JUMP_AT_LEAST, _FIRST_OF_X32, skip_if_false=1),
        refuse,
    ]
    refused = [*_REFUSED.values()]
    if landlock_version < 3:
        refused.append(_TRUNCATE_CALL)
    for number in refused:
        program += [_instruction(_JUMP_EQUAL, number, skip_if_false=1), refuse]
    # glibc falls back on clone, whose flags a filter can read.
    program += [
        _instruction(_JUMP_EQUAL, _CLONE3, skip_if_false=1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    threads_only = [
        low_word(0),
        _instruction(_JUMP_ANY_BIT, _CLONE_THREAD, skip_if_true=1),
        refuse,
        allow,
    ]
    to_itself = [low_word(0), _instruction(_JUMP_EQUAL, pid, skip_if_true=1), refuse, allow]
    harmless_options = [low_word(0)]
    for option in _PRCTL_REFUSED:
        harmless_options += [_instruction(_JUMP_EQUAL, option, skip_if_false=1), refuse]
    harmless_options.append(allow)
    # prlimit(0, resource, NULL, ...) asks for its own limit and sets none.
    reads_its_limits = [
        low_word(0),
        _instruction(_JUMP_EQUAL, 0, skip_if_true=1),
        refuse,
        low_word(2),
        _instruction(_JUMP_EQUAL, 0, skip_if_true=1),
        refuse,
        high_word(2),
        _instruction(_JUMP_EQUAL, 0, skip_if_true=1),
        refuse,
        allow,
    ]
    for number, checks in (
        (_CLONE, threads_only),
        (_KILL, to_itself),
        (_TGKILL, to_itself),
        (_PRCTL, harmless_options),
        (_PRLIMIT, reads_its_limits),
    ):
        program += [_instruction(_JUMP_EQUAL, number, skip_if_false=len(checks)), *checks]
    program.append(allow)
    return b"".join(program)


def _instruction(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))
