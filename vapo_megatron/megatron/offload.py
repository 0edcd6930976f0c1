"""Offloading of models in parts, storage by storage, and which parts are on the device in each
phase of a step.

A part's tensors keep their identity: their storages are emptied and refilled, so that views into
Megatron's flat buffers, optimizer states and cached shards stay valid. On CUDA, copies go through
pinned memory, in each direction on its own stream; on the CPU the same code moves the same
bytes.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, UntypedStorage

from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.bucket import sum_of_words

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)

# CUDA's allocator of pinned memory rounds up to a power of two: pieces of one waste nothing.
_PIECE_BYTES = 1 << 28


@dataclass(frozen=True)
class Footprint:
    """Bytes of a part of a model by place. `host` stays reserved while the part is onloaded."""

    device: int
    host: int


class _HostBuffer:
    """Bytes in host memory, in pieces; it grows and never shrinks."""

    def __init__(self, pinned: bool, piece_bytes: int = _PIECE_BYTES) -> None:
        self._pinned = pinned
        self._piece_bytes = piece_bytes
        self._pieces: list[Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(piece.numel() for piece in self._pieces)

    def reserve(self, size: int) -> None:
        """Make room for at least `size` bytes. Growing loses the content."""
        if size > self.bytes:
            full, rest = divmod(size, self._piece_bytes)
            self._pieces = []  # freed before others are taken
            sizes = [self._piece_bytes] * full + [rest] * (rest > 0)
            self._pieces = [
                torch.empty(n, dtype=torch.uint8, pin_memory=self._pinned) for n in sizes
            ]

    def spans(self, start: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """The parts of pieces that make up bytes start .. start + size, each with its offset in
        that range."""
        done = 0
        while done < size:
            piece, at = divmod(start + done, self._piece_bytes)
            span = self._pieces[piece][at : at + size - done]
            yield span, done
            done += span.numel()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def distinct_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages under some tensors, each once, by identity."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


class Offloader:
    """Moves the parts of one model, or of what two models share. Every method may be called at any
    time; parts that are already in place stay there."""

    def __init__(
        self,
        tensors: Callable[[Part], Iterable[Tensor]],
        platform: Platform,
        enabled: bool,
        before_release: Callable[[], None] = lambda: None,
    ) -> None:
        """tensors: all tensors of a part, offloaded or not; a storage that several parts share
        belongs to the first of PARTS. enabled: if false, everything stays on the device and is only
        accounted for. before_release: called before anything leaves, to finish pending work on the
        tensors."""
        self._tensors = tensors
        self._platform = platform
        self._enabled = enabled
        self._before_release = before_release
        self._leaving = platform.copy_queue()
        self._returning = platform.copy_queue()
        self._host = {part: _HostBuffer(platform.is_cuda) for part in PARTS}
        self._offloaded: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        self._sent: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        self._arriving: dict[Part, torch.cuda.Event | None] = {}
        # Of weights that came from host memory: their storages, and the sums of their words.
        self._arrived: tuple[list[tuple[int, int]], Tensor] | None = None

    @property
    def onloaded(self) -> frozenset[Part]:
        """The parts that are on the device."""
        return frozenset(part for part in PARTS if part not in self._offloaded)

    def onload_only(self, *parts: Part) -> None:
        """Keep exactly these parts on the device. Parts that return may still be on their way: see
        require()."""
        self.send_all_but(*parts)
        self.free_sent()
        self.fetch(*parts)

    def send_all_but(self, *parts: Part) -> None:
        """Begin to copy every other part to host memory; free_sent() has to follow. Weights that
        did not change since they came from there are not copied."""
        if not self._enabled:
            return
        staying = {*parts, *self._offloaded, *self._sent}
        leaving = [part for part in PARTS if part not in staying]
        if not leaving:
            return
        self._before_release()
        self.require(*leaving)  # copies that are still arriving
        # Before any of them is emptied: a storage that two parts share belongs to the first.
        sent = {
            part: [(storage, storage.nbytes()) for storage in self._storages(part)]
            for part in leaving
        }
        unchanged = "weights" in sent and self._unchanged(sent["weights"])
        with self._leaving.behind_computation():
            for part, storages in sent.items():
                # Gradients are zero at the start of every step.
                if part != "gradients" and not (part == "weights" and unchanged):
                    self._copy_to_host(part, storages)
        self._sent |= sent

    def free_sent(self) -> None:
        """Wait until what send_all_but() sends is in host memory, and free its device memory."""
        if not self._sent:
            return
        self._leaving.finish()
        for storages in self._sent.values():
            for storage, _ in storages:
                storage.resize_(0)
        self._offloaded |= self._sent
        self._sent = {}
        self._platform.empty_cache()

    def fetch(self, *parts: Part, room: float = math.inf) -> float:
        """Onload the parts that fit `room` bytes; returns the bytes that remain."""
        for part in PARTS:
            if part in parts and part in self._offloaded:
                size = sum(size for _, size in self._offloaded[part])
                if size <= room:
                    self._restore(part)
                    room -= size
        return room

    def require(self, *parts: Part) -> None:
        """Call before these parts are used: they are onloaded if needed, and the device waits for
        their copies."""
        for part in parts:
            self._restore(part)
            self._returning.hold_computation_until(self._arriving.pop(part, None))

    def footprint(self) -> dict[Part, Footprint]:
        """Bytes of each part now, by place."""
        device = {part: sum(s.nbytes() for s in self._storages(part)) for part in self.onloaded}
        return {part: Footprint(device.get(part, 0), self._host[part].bytes) for part in PARTS}

    def _storages(self, part: Part) -> list[UntypedStorage]:
        kind = self._platform.device_type
        storages = distinct_storages(t for t in self._tensors(part) if t.device.type == kind)
        for earlier in PARTS[: PARTS.index(part)]:
            for identity in distinct_storages(self._tensors(earlier)):
                storages.pop(identity, None)
        return list(storages.values())

    def _unchanged(self, storages: list[tuple[UntypedStorage, int]]) -> bool:
        """Whether host memory has the content of these storages of the weights: sums of words are
        compared, as in every weight sync."""
        if self._arrived is None:
            return False
        identities, sums = self._arrived
        if identities != [(storage._cdata, size) for storage, size in storages]:
            return False
        return torch.equal(sums, _sums(storages))

    def _copy_to_host(self, part: Part, storages: list[tuple[UntypedStorage, int]]) -> None:
        host = self._host[part]
        start = 0
        host.reserve(sum(size for _, size in storages))
        for storage, size in storages:
            source = bytes_of(storage)
            for span, offset in host.spans(start, size):
                span.copy_(source[offset : offset + span.numel()], non_blocking=True)
            start += size

    def _restore(self, part: Part) -> None:
        if part not in self._offloaded:
            return
        storages = self._offloaded.pop(part)
        start = 0
        for storage, size in storages:
            storage.resize_(size)
            if part == "gradients":
                bytes_of(storage).zero_()
        if part == "gradients":
            return
        with self._returning.behind_computation():
            for storage, size in storages:
                target = bytes_of(storage)
                for span, offset in self._host[part].spans(start, size):
                    target[offset : offset + span.numel()].copy_(span, non_blocking=True)
                start += size
            if part == "weights":
                identities = [(storage._cdata, size) for storage, size in storages]
                self._arrived = (identities, _sums(storages))
        self._arriving[part] = self._returning.mark()


def _sums(storages: list[tuple[UntypedStorage, int]]) -> Tensor:
    """The sum of the words of each storage, int64, on their device."""
    sums = [sum_of_words(bytes_of(storage)) for storage, _ in storages]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


Phase = Literal[
    "rollout",
    "score_reference",
    "score_policy",
    "score_values",
    "update_critic",
    "update_policy",
    "replace_reference",
    "weight_sync",
    "export_policy",
    "export_critic",
]

WEIGHTS: frozenset[Part] = frozenset({"weights"})
ALL: frozenset[Part] = frozenset(PARTS)

# Parts that are not named are offloaded. While engines generate they have the device to themselves.
# "base": the weights that actor and critic share if both train adapters.
ONLOADED: Mapping[Phase, Mapping[str, frozenset[Part]]] = {
    "rollout": {},
    "score_reference": {"reference": WEIGHTS},
    "score_policy": {"actor": WEIGHTS, "base": WEIGHTS},
    "score_values": {"critic": WEIGHTS, "base": WEIGHTS},
    "update_critic": {"critic": ALL, "base": WEIGHTS},
    "update_policy": {"actor": ALL, "base": WEIGHTS},
    "replace_reference": {"actor": WEIGHTS, "reference": WEIGHTS},
    "weight_sync": {"actor": WEIGHTS, "base": WEIGHTS},
    "export_policy": {"actor": WEIGHTS, "base": WEIGHTS},
    "export_critic": {"critic": WEIGHTS, "base": WEIGHTS},
}

Residency = Mapping[Phase, Mapping[str, frozenset[Part]]]
"""The parts of models that may stay on the device in each phase, those that it needs among them."""

_GIB = 2**30


class MemoryPlan:
    """Moves models between phases, and records what each phase held when it ended."""

    def __init__(
        self,
        models: Mapping[str, Offloader],
        shares_device: bool = True,
        stays: Residency = ONLOADED,
        free_bytes: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """models: by name, as in ONLOADED. shares_device: whether engines use the same device; if
        not, nothing is offloaded for rollouts. stays: what there is room for in a phase beside what
        it needs; a part in device memory stays. free_bytes: of the device, where parts may arrive
        before others have left."""
        self._models = dict(models)
        self._shares_device = shares_device
        self._stays = stays
        self._free_bytes = free_bytes
        self._phase: Phase | None = None
        self._seconds = 0.0
        self._held: dict[Phase, dict[tuple[str, Part], Footprint]] = {}

    def enter(self, phase: Phase) -> None:
        """Have on the device what a phase needs of every model, and what may stay. Parts arrive
        while others leave where there is room for both, and the rest after that."""
        self.settle()
        self._phase = phase
        started = time.perf_counter()
        if phase == "rollout" and not self._shares_device:
            return
        if phase == "score_reference" and "reference" not in self._models:
            phase = "score_policy"  # it is the actor without its adapters
        needed = ONLOADED[phase]
        stays = self._stays.get(phase, needed)
        for name, model in self._models.items():
            model.send_all_but(*needed.get(name, ()), *stays.get(name, ()))
        room = self._free_bytes()
        for name, model in self._models.items():
            room = model.fetch(*needed.get(name, ()), room=room)
        for model in self._models.values():
            model.free_sent()
        for name, model in self._models.items():
            model.fetch(*needed.get(name, ()))
        self._seconds += time.perf_counter() - started

    def settle(self) -> None:
        """Record what the current phase holds."""
        if self._phase is not None:
            self._held[self._phase] = {
                (name, part): footprint
                for name, model in self._models.items()
                for part, footprint in model.footprint().items()
                if footprint.device or footprint.host
            }

    def metrics(self) -> dict[str, float]:
        """GiB of this rank: memory/<phase>/<place>_gib as each phase last ended, and
        memory/<model>/<part>_gib. And the seconds of its moves since the last call, except what
        arrives during the next phase."""
        metrics = {"time/offload": self._seconds}
        self._seconds = 0.0
        for phase, parts in self._held.items():
            metrics[f"memory/{phase}/device_gib"] = sum(p.device for p in parts.values()) / _GIB
            metrics[f"memory/{phase}/host_gib"] = sum(p.host for p in parts.values()) / _GIB
        for name in self._models:
            for part in PARTS:  # where it was largest
                held = [parts[name, part] for parts in self._held.values() if (name, part) in parts]
                if held:
                    metrics[f"memory/{name}/{part}_gib"] = (
                        max(size.device or size.host for size in held) / _GIB
                    )
        return metrics
