"""A whole Slurm on one host for as long as it is needed: munged, slurmctld and a slurmd for each of
four nodes.

The nodes are called 127.0.0.1 to 127.0.0.4, so that a node's name is an address under which it can
be reached. All files lie in one temporary folder; every daemon is a child of this process, ended by
its id, and dies with it.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ports import free_ports

NODES = tuple(f"127.0.0.{index}" for index in range(1, 5))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2

_CONFIG = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until the credentials of its last try have expired: 120 s by default.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MailProg=/bin/true
SlurmctldPort={port}
# Job ids tell the processes and folders of jobs apart, also from another sandbox on this host.
FirstJobId={first_job}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SwitchType=switch/none
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=1
KillWait={kill_wait}
MinJobAge=3600
SlurmdTimeout=300
InactiveLimit=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
"""


def missing_programs() -> list[str]:
    """What of Slurm this machine lacks. Debian's daemons lie in /usr/sbin, which not every PATH
    holds."""
    return [program for program in PROGRAMS if _program(program) is None]


class SlurmSandbox:
    """Four nodes, one partition, eight cores and one GPU a node on paper. Use as a context manager,
    as root.

    Args:
        kill_wait: seconds between SIGTERM and SIGKILL of a job that is ended.
    """

    def __init__(self, kill_wait: int = 30) -> None:
        # Not pytest's folder: munged's socket must have a short path, and its folder no other
        # writers.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-sandbox-"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._kill_wait = kill_wait
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SlurmSandbox":
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
            self.wait_until("every node is idle", lambda: set(self.nodes("idle")) == set(NODES), 60)
        except BaseException as error:
            for log in sorted(self.folder.glob("*.log")):
                error.add_note(
                    f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                )
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # With the daemons gone nobody would end their processes.
            with contextlib.suppress(subprocess.CalledProcessError, TimeoutError):
                if running := self.call("squeue", "--noheader", "--format=%A").split():
                    self.call("scancel", *running)
                    self.wait_until(
                        "every job has ended", lambda: not self.call("squeue", "--noheader"), 60
                    )
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
            for daemon in self._daemons:
                try:
                    daemon.wait(15)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def call(
        self, *command: str, cwd: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> str:
        """What a Slurm command prints.

        Raises:
            CalledProcessError: it failed; its standard error is in the message.
        """
        environment = {**self.environment, **(extra or {})}
        done = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240
        )
        if done.returncode:
            error = subprocess.CalledProcessError(
                done.returncode, command, done.stdout, done.stderr
            )
            error.add_note(done.stderr.strip())
            raise error
        return done.stdout.strip()

    def submit(
        self, script: Path, cwd: Path, options: Sequence[str], arguments: Sequence[str] = ()
    ) -> str:
        """The id of a job: `sbatch options script arguments`, run in cwd."""
        return self.call("sbatch", "--parsable", *options, str(script), *arguments, cwd=cwd)

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says of a job: JobState, ExitCode, Restarts, NodeList,
        ExcNodeList ..."""
        fields = self.call("scontrol", "show", "--oneliner", "job", job_id).splitlines()[0].split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def nodes(self, state: str) -> list[str]:
        """Names of the nodes in a state, such as idle or down."""
        return self.call(
            "sinfo", "--noheader", "--Node", f"--states={state}", "--format=%N"
        ).split()

    def wait_until(self, what: str, is_so: Callable[[], Any], seconds: float) -> Any:
        """The first true value of is_so().

        Raises:
            TimeoutError: naming `what`, where it stays false for so many seconds.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := is_so():
                return found
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"waited {seconds:g} s until {what}")

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        first, *ports = free_ports(1 + len(NODES))
        first_job = os.getpid() % 300_000 * 100 + 1
        lines = [
            _CONFIG.format(
                host=host,
                folder=self.folder,
                port=first,
                first_job=first_job,
                kill_wait=self._kill_wait,
            )
        ]
        lines += [
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=8 "
            "RealMemory=2000 Gres=gpu:1\n"
            for node, port in zip(NODES, ports, strict=True)
        ]
        lines.append(
            f"PartitionName=batch Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
        )
        (self.folder / "slurm.conf").write_text("".join(lines))
        # Slurm hands out what has a device file, and any will do: nothing is computed on it.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        for name in ("state", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        # Only so do others reach the socket, as munged wants it; mkdtemp lets nobody else in.
        self.folder.chmod(0o711)
        files = [f"--{kind}-file={self.folder / 'munge'}.{kind}" for kind in ("pid", "log", "seed")]
        socket_path = self.folder / "munge.sock"
        self._start(
            "munged",
            "munged",
            "--foreground",
            f"--socket={socket_path}",
            f"--key-file={key}",
            *files,
        )
        self.wait_until("munged listens", socket_path.exists, 30)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        with (self.folder / f"{name}.log").open("wb") as log:
            daemon = subprocess.Popen(
                [path, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_node if program == "slurmd" else _die_with_parent,
            )
        self._daemons.append(daemon)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _node() -> None:
    """Jobs of a story run until something happens to them: tests beside it come first."""
    _die_with_parent()
    os.nice(5)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
