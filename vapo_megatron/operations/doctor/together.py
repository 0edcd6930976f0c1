"""What only several nodes together show: one file system, one time, ways between them, equal software."""

import hashlib
import json
import secrets
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from vapo_megatron.config.run_directory import existing
from vapo_megatron.operations.doctor.meeting import Meeting
from vapo_megatron.operations.doctor.report import Line

_CONTENT_BYTES = 1 << 16
# Network file systems show a new file to other nodes after their attribute caches have run out.
_APPEARS_WITHIN = 30.0
# Slurm's credentials and file times tolerate no more than a few seconds.
_CLOCK_WARNING, _CLOCK_FAULT = 1.0, 30.0


def check_shared_files(meeting: Meeting, root: Path, deadline: float) -> list[Line]:
    """Whether every node sees the same files under run.root: each writes one, node 0's is read by all and all by it."""
    folder, remedy = existing(root.absolute()), "put run.root on a file system that all nodes mount, at the same path"
    mine = folder / f".doctor.shared.{meeting.index}.{secrets.token_hex(4)}"
    content = secrets.token_bytes(_CONTENT_BYTES)
    try:
        mine.write_bytes(content)
    except OSError as error:
        meeting.put(f"shared/{meeting.index}", None)
        return [Line("fault", f"{folder} cannot be written ({error.strerror or error})", remedy)]
    try:
        if len(meeting.nodes) == 1:
            return [Line("ok", f"{folder}: one node, written")]
        meeting.put(f"shared/{meeting.index}", [str(mine), hashlib.sha256(content).hexdigest()])
        others = [0] if meeting.index else range(1, len(meeting.nodes))
        end = time.monotonic() + deadline
        told = {other: meeting.get(f"shared/{other}", max(0.0, end - time.monotonic())) for other in others}
        appears = time.monotonic() + _APPEARS_WITHIN  # all of them together: nothing may be shared by many nodes
        blind = {other: said for other, file in told.items() if (said := _unseen(file, appears))}
        meeting.put(f"shared/seen/{meeting.index}", True)
        meeting.get_all("shared/seen", deadline)  # files stay until everybody has looked
    finally:
        mine.unlink(missing_ok=True)
    if not blind:
        return [Line("ok", f"{folder}: the same on {len(meeting.nodes)} nodes")]
    named = "; ".join(f"{meeting.nodes[other]}: {said}" for other, said in islice(blind.items(), 4))
    named += f"; and {len(blind) - 4} more" if len(blind) > 4 else ""
    # Node 0 hears of others what they themselves say as well: theirs is the fault.
    return [Line("fault" if meeting.index else "warning", named, remedy)]


def _unseen(told: tuple[str, str] | None, end: float) -> str | None:
    """What is wrong with another node's file, as seen from here until a time of the monotonic clock."""
    if told is None:
        return "wrote no file"
    path, digest = Path(told[0]), told[1]
    while True:
        if path.is_file():
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                return None
            said = f"{path} has another content here"
        else:
            said = f"{path} is not seen here"
        if time.monotonic() > end:
            return said
        time.sleep(0.2)


def check_clock(meeting: Meeting, deadline: float) -> list[Line]:
    """Difference of this node's clock from node 0's, taken half way between question and answer (Cristian 1989)."""
    if meeting.index == 0:
        end, waiting = time.monotonic() + deadline, set(range(1, len(meeting.nodes)))
        while waiting and time.monotonic() < end:
            # Each node that asks is answered at once, whichever others are still to come.
            for other in [other for other in waiting if meeting.get(f"clock/ask/{other}", 0)]:
                meeting.put(f"clock/{other}", time.time())
                waiting.discard(other)
            time.sleep(0.002)
        return [Line("ok", "the others are compared with this one")]
    asked = time.time()
    meeting.put(f"clock/ask/{meeting.index}", True)
    theirs = meeting.get(f"clock/{meeting.index}", deadline)
    if theirs is None:
        return [Line("warning", "node 0 did not tell its time", "see what it reports")]
    answered = time.time()
    return [judge_clock((asked + answered) / 2 - theirs, (answered - asked) / 2)]


def judge_clock(difference: float, uncertainty: float) -> Line:
    """A line on a difference of clocks, known up to an uncertainty; seconds."""
    found = f"{difference:+.2f} s from node 0's (up to {uncertainty:.2f} s of it may be the way)"
    least = abs(difference) - uncertainty
    remedy = "start chronyd or ntpd: file times and Slurm's credentials go by the clock"
    if least > _CLOCK_FAULT:
        return Line("fault", found, remedy)
    return Line("warning", found, remedy) if least > _CLOCK_WARNING else Line("ok", found)


def check_reachable(meeting: Meeting, deadline: float) -> list[Line]:
    """Whether node 0 reaches an unreserved port of every node, as it has to reach engines."""
    remedy = "open the ports of net.ipv4.ip_local_port_range between the nodes of a job"
    with socket.socket() as listener:
        host = "127.0.0.1" if len(meeting.nodes) == 1 else _own_address(meeting)
        try:
            listener.bind((host, 0))
            listener.listen()
        except OSError as error:
            return [Line("fault", f"no port of {host} can be had ({error.strerror or error})", remedy)]
        port = listener.getsockname()[1]
        if len(meeting.nodes) == 1:
            if said := _connects(host, port):
                return [Line("fault", said, remedy)]
            return [Line("ok", f"a free port of {host} answers")]
        meeting.put(f"ports/{meeting.index}", [host, port])
        if meeting.index == 0:
            told = meeting.get_all("ports", deadline)
            with ThreadPoolExecutor(64) as pool:  # a firewall that says nothing takes 5 s for each
                found = list(pool.map(lambda one: _connects(*one) if one else "gave no port", told))
            for other, said in enumerate(found):
                meeting.put(f"ports/said/{other}", said)
            meeting.put("ports/done", True)
        # A missing node makes node 0 wait for as long as this one waits for node 0.
        meeting.get("ports/done", 2 * deadline)
        said = meeting.get(f"ports/said/{meeting.index}", 0)
    if said is None:
        return [Line("warning", "node 0 did not try to reach this node", "see what it reports")]
    if said:
        return [Line("fault", f"node 0 cannot reach {host}: {said}", remedy)]
    return [Line("ok", f"node 0 reaches {host}")]


def _own_address(meeting: Meeting) -> str:
    """The address of this node that other nodes know."""
    try:
        return socket.gethostbyname(meeting.node)
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def _connects(host: str, port: int) -> str:
    """Why a port does not answer; empty where it does."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return ""
    except OSError as error:
        return f"{host}:{port} does not answer ({error.strerror or error})"


def check_alike(meeting: Meeting, facts: dict[str, str], deadline: float) -> list[Line]:
    """Whether this node's facts are those of most nodes."""
    meeting.put(f"alike/{meeting.index}", facts)
    told = meeting.get_all("alike", deadline)
    counted = Counter(json.dumps(found, sort_keys=True) for found in told if found is not None)
    usual = json.loads(counted.most_common(1)[0][0])
    different = [f"{key} {facts[key]}, most nodes have {usual[key]}" for key in facts if facts[key] != usual.get(key)]
    if different:
        return [Line("fault", "; ".join(different), "give all nodes the same environment, driver and files")]
    return [Line("ok", ", ".join(f"{key} {value}" for key, value in facts.items()))]
