"""Offloading of models in parts, storage by storage, and which parts are on the device in each phase of a step.

A part's tensors keep their identity: their storages are emptied and refilled, so that views into Megatron's flat
buffers, optimizer states and cached shards stay valid. On CUDA, copies go through pinned memory on a separate stream;
on the CPU the same code moves the same bytes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, UntypedStorage

from vapo_megatron.megatron.platform import Platform

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
        self._pinned, self._piece_bytes = pinned, piece_bytes
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
            self._pieces = [torch.empty(n, dtype=torch.uint8, pin_memory=self._pinned) for n in sizes]

    def spans(self, start: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """The parts of pieces that make up bytes start .. start + size, each with its offset in that range."""
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
    """Moves the parts of one model, or of what two models share. Every method may be called at any time; parts that are
    already in place stay there."""

    def __init__(
        self,
        tensors: Callable[[Part], Iterable[Tensor]],
        platform: Platform,
        enabled: bool,
        before_release: Callable[[], None] = lambda: None,
    ) -> None:
        """tensors: all tensors of a part, offloaded or not; a storage that several parts share belongs to the first of
        PARTS. enabled: if false, everything stays on the device and is only accounted for. before_release: called
        before anything leaves, to finish pending work on the tensors."""
        self._tensors, self._platform, self._enabled = tensors, platform, enabled
        self._before_release = before_release
        self._queue = platform.copy_queue()
        self._host = {part: _HostBuffer(platform.is_cuda) for part in PARTS}
        self._offloaded: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        self._arriving: dict[Part, torch.cuda.Event | None] = {}

    @property
    def onloaded(self) -> frozenset[Part]:
        """The parts that are on the device."""
        return frozenset(part for part in PARTS if part not in self._offloaded)

    def onload_only(self, *parts: Part) -> None:
        """Keep exactly these parts on the device. Parts that return may still be on their way: see require()."""
        if not self._enabled:
            return
        self._release([part for part in PARTS if part not in parts and part not in self._offloaded])
        for part in PARTS:
            if part in parts:
                self._restore(part)

    def require(self, *parts: Part) -> None:
        """Call before these parts are used: they are onloaded if needed, and the device waits for their copies."""
        for part in parts:
            self._restore(part)
            self._queue.hold_computation_until(self._arriving.pop(part, None))

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

    def _release(self, parts: list[Part]) -> None:
        if not parts:
            return
        self._before_release()
        self.require(*parts)  # copies that are still arriving
        leaving = {part: [(storage, storage.nbytes()) for storage in self._storages(part)] for part in parts}
        with self._queue.behind_computation():
            for part, storages in leaving.items():
                if part == "gradients":  # zero at the start of every step
                    continue
                host, start = self._host[part], 0
                host.reserve(sum(size for _, size in storages))
                for storage, size in storages:
                    source = bytes_of(storage)
                    for span, offset in host.spans(start, size):
                        span.copy_(source[offset : offset + span.numel()], non_blocking=True)
                    start += size
        self._queue.finish()
        for storages in leaving.values():
            for storage, _ in storages:
                storage.resize_(0)
        self._offloaded |= leaving
        self._platform.empty_cache()

    def _restore(self, part: Part) -> None:
        if part not in self._offloaded:
            return
        storages, start = self._offloaded.pop(part), 0
        for storage, size in storages:
            storage.resize_(size)
            if part == "gradients":
                bytes_of(storage).zero_()
        if part == "gradients":
            return
        with self._queue.behind_computation():
            for storage, size in storages:
                target = bytes_of(storage)
                for span, offset in self._host[part].spans(start, size):
                    target[offset : offset + span.numel()].copy_(span, non_blocking=True)
                start += size
        self._arriving[part] = self._queue.mark()


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

# Parts that are not named are offloaded. While engines generate they have the device to themselves. "base": the weights
# that actor and critic share if both train adapters.
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

_GIB = 2**30


class MemoryPlan:
    """Moves models between phases, and records what each phase held when it ended."""

    def __init__(self, models: Mapping[str, Offloader], shares_device: bool = True) -> None:
        """models: by name, as in ONLOADED. shares_device: whether engines use the same device; if not, nothing is
        offloaded for rollouts."""
        self._models, self._shares_device = dict(models), shares_device
        self._phase: Phase | None = None
        self._seconds = 0.0
        self._held: dict[Phase, dict[tuple[str, Part], Footprint]] = {}

    def enter(self, phase: Phase) -> None:
        """Have on the device exactly what a phase needs of every model; parts leave before others arrive."""
        self.settle()
        self._phase, started = phase, time.perf_counter()
        if phase == "rollout" and not self._shares_device:
            return
        needed = ONLOADED[phase]
        if phase == "score_reference" and "reference" not in self._models:
            needed = ONLOADED["score_policy"]  # it is the actor without its adapters
        for name, model in self._models.items():
            model.onload_only(*(model.onloaded & needed.get(name, frozenset())))
        for name, model in self._models.items():
            model.onload_only(*needed.get(name, frozenset()))
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
        """GiB of this rank: memory/<phase>/<place>_gib as each phase last ended, and memory/<model>/<part>_gib. And the
        seconds of its moves since the last call, but for what arrives during the next phase."""
        metrics, self._seconds = {"time/offload": self._seconds}, 0.0
        for phase, parts in self._held.items():
            metrics[f"memory/{phase}/device_gib"] = sum(p.device for p in parts.values()) / _GIB
            metrics[f"memory/{phase}/host_gib"] = sum(p.host for p in parts.values()) / _GIB
        for name in self._models:
            for part in PARTS:  # where it was largest
                held = [parts[name, part] for parts in self._held.values() if (name, part) in parts]
                if held:
                    metrics[f"memory/{name}/{part}_gib"] = max(size.device or size.host for size in held) / _GIB
        return metrics
