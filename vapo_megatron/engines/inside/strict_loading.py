"""Weight updates, inside the engine, that report the tensors they could not place.

SGLang's models skip names they do not know and report success; they also stack what a checkpoint
keeps apart (query, key and value; gate and up) and cut it over tensor-parallel ranks. Only the
model's own loader knows which elements of which parameter a tensor fills, so it is watched while it
copies: a tensor that wrote nothing is unknown, and a parameter that is not written in full was not
    sent in full. The same watch, comparing instead of copying, finds tensors
that differ. The answer has checksums of the bytes as they arrived, which the sender compares with
its own.

The watch costs tens of copies a tensor. Where the loader did nothing but copy a tensor, it is
copied to the same places without it when the same bucket comes in a later sync (replay.py), and the
first time compared with what the loader would have done. The loader is given the other tensors. A
bucket without others can also be changed by the words that differ from the last sync: its bytes are
read back from the parameters, changed and written again. And where a rank was found to read nothing
but the shares of the trainer's rank of its number, it takes a bucket in which nothing else is in
its place.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from vapo_megatron.engines.inside.parameter_watch import ParameterWatch
from vapo_megatron.engines.inside.replay import BucketReplay, Placement
from vapo_megatron.weights.bucket import (
    NEEDS_GATHERED,
    Place,
    Purpose,
    sum_of_words,
    sums_of_places,
    view,
)
from vapo_megatron.weights.changes import (
    NEEDS_WHOLE,
    Difference,
    apply_changes,
    digest_of,
    placed_sum,
)

NamedTensor = tuple[str, torch.Tensor]

# Buckets that are remembered; a sync of other sizes than the one before begins to learn again.
_MOST_REPLAYS = 4096
# Projections that SGLang's models with latent attention hold as one parameter, and the end of its
# name. Their loaders keep the first of the two until the other comes, within one call.
_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
_PAIR_AS_ONE = "fused_qkv_a_proj_with_mqa.weight"


class StrictLoader:
    """Takes the buckets of one weight sync after another into one model, or one tensor-parallel
    rank's part of it.

    checksums: of the tensors of the latest bucket, as they arrived. unknown: the problem lines of
        its tensors that
    filled nothing on this rank, among them experts of other ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.checksums: list[int] = []
        self.unknown: list[str] = []
        # Checksums run beside the copies and outside the watch, which would slow each of their
        # operations.
        self._pool = ThreadPoolExecutor(1, "vapo-checksums")
        self._pads = _pads_dimensions(model)
        self._has_pairs = any(name.endswith(_PAIR_AS_ONE) for name, _ in model.named_parameters())
        # The first of each pair whose other half has not come yet: it may be in the next bucket.
        self._halves: dict[str, torch.Tensor] = {}
        self._written: Counter[str] = Counter()
        self._sources: defaultdict[str, list[str]] = defaultdict(list)
        # What the loader did with each tensor of the latest bucket, and outside of them.
        self._placements: list[Placement] = []
        self._is_plain = True
        self._replays: dict[tuple[Place, ...], BucketReplay] = {}
        self._addresses: dict[str, int] = {}
        # Buckets of this sync that were changed, which a whole one may replace.
        self._changed: set[tuple[Place, ...]] = set()

    def take_bucket(
        self,
        places: tuple[Place, ...],
        buffer: torch.Tensor,
        purpose: Purpose,
        *,
        first: bool,
        last: bool,
        changes_follow: bool = False,
        own_shares: bool = False,
    ) -> list[str]:
        """take() of the tensors at these places of a buffer; a bucket that was learnt is copied.

        changes_follow: later syncs may send this bucket's changes, see take_changes().
        own_shares: see weights.bucket.Bucket. Returns [NEEDS_GATHERED], and changes nothing, unless
            take_mask() found that this rank reads nothing else.
        """
        if purpose == "cover":
            return self.take_mask(places, buffer)
        if first:
            self._begin()
        replay = self._replays.get(places)
        if own_shares and not (replay is not None and replay.is_own and self._is_plain):
            self.unknown = []
            self.checksums = sums_of_places(buffer, places)
            return [NEEDS_GATHERED]
        if places in self._changed and replay is not None:
            self._changed.remove(places)
            self._count_replay(replay, -1)
        if replay is not None and purpose == "load":
            replay.digest = ""  # until all is written, by a sender that sends changes
        sums = self._pool.submit(sums_of_places, buffer, places)
        if replay is not None and self._is_plain and purpose == "load" and not last:
            problems = self._replayed(replay, buffer)
        else:
            tensors = [(place.name, view(buffer, place)) for place in places]
            problems = self.take(tensors, purpose, first=False, last=last)
            if purpose == "load" and not last and problems == self.unknown:
                self._learn(places)
        self.checksums = sums.result()
        replay = self._replays.get(places)
        if changes_follow and replay is not None and replay.compared and replay.is_readable:
            replay.digest = digest_of(self.checksums)
            replay.held = placed_sum(self._read_back(replay, len(buffer)))
        return problems

    def take_mask(self, places: tuple[Place, ...], mask: torch.Tensor) -> list[str]:
        """Whether this rank reads nothing of a bucket but what is above zero in a mask: from then
        on take_bucket() takes own shares of it. Returns [NEEDS_GATHERED] if it may read more."""
        self.unknown = []
        self.checksums = sums_of_places(mask, places)
        replay = self._replays.get(places)
        if replay is None or not replay.compared or not self._is_plain:
            return [NEEDS_GATHERED]
        replay.is_own = replay.reads_within(mask)
        return [] if replay.is_own else [NEEDS_GATHERED]

    def take_changes(
        self,
        places: tuple[Place, ...],
        changes: torch.Tensor,
        difference: Difference,
        size: int,
        *,
        first: bool,
    ) -> list[str]:
        """Change a bucket of `size` bytes by changed_words().

        Returns [NEEDS_WHOLE], and changes nothing, unless this process holds the bucket that
        they are changes of. checksums: of the changes alone.
        """
        if first:
            self._begin()
        self.unknown = []
        self.checksums = [int(sum_of_words(changes))]
        replay = self._replays.get(places)
        if replay is None or not self._is_plain or replay.digest != difference.base:
            return [NEEDS_WHOLE]
        buffer = self._read_back(replay, size)
        if placed_sum(buffer) != replay.held:
            return [NEEDS_WHOLE]
        replay.digest = ""  # until all is written
        apply_changes(buffer, changes.to(buffer.device))
        replay.run(buffer)
        replay.read_back(buffer)
        replay.held = placed_sum(buffer)
        replay.digest = difference.result
        self._count_replay(replay, 1)
        self._changed.add(places)
        self.unknown = list(replay.unknown)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return list(replay.unknown)

    def _read_back(self, replay: BucketReplay, size: int) -> torch.Tensor:
        device = next(self._model.parameters()).device
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        replay.read_back(buffer)
        return buffer

    def _count_replay(self, replay: BucketReplay, sign: int) -> None:
        """Count a replayed bucket's elements and sources as written; -1: no longer."""
        for name, elements in replay.written.items():
            self._written[name] += sign * elements
        for name, sources in replay.sources.items():
            if sign > 0:
                self._sources[name] += sources
            else:
                for source in sources:
                    self._sources[name].remove(source)

    def _replayed(self, replay: BucketReplay, buffer: torch.Tensor) -> list[str]:
        before = None if replay.compared else self._counts()
        replay.run(buffer)
        problems: list[str] = []
        if replay.others:
            others = [(place.name, view(buffer, place)) for place in replay.others]
            found = self.take(others, "load", first=False, last=False)
            problems = [line for line in found if line not in replay.unknown]
        if before is not None:
            # Once: is all now as the loader would have left it?
            after = self._counts()
            tensors = [(place.name, view(buffer, place)) for place in replay.places]
            found = self.take(tensors, "compare", first=False, last=False)
            if found != list(replay.unknown):
                self._written, self._sources = before
                self._is_plain = False  # the loader does something else than it did before
                return self.take(tensors, "load", first=False, last=False)
            self._written, self._sources = after
            replay.compared = True
        self._count_replay(replay, 1)
        self.unknown = list(replay.unknown)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [*replay.unknown, *problems]

    def _counts(self) -> tuple[Counter[str], defaultdict[str, list[str]]]:
        """Copies of the elements and sources that were counted so far."""
        sources = {name: [*found] for name, found in self._sources.items()}
        return self._written.copy(), defaultdict(list, sources)

    def _learn(self, places: tuple[Place, ...]) -> None:
        """Keep the writes of the latest bucket, if copies can repeat them."""
        if not self._is_plain:
            self._replays.clear()
            return
        replay = BucketReplay.of(places, self._placements, self.unknown)
        if replay is not None:
            self._replays[places] = replay

    def _begin(self) -> None:
        """Begin a weight sync."""
        self._written.clear()
        self._sources.clear()
        self._halves.clear()
        self._changed.clear()
        addresses = {name: p.data_ptr() for name, p in self._model.named_parameters()}
        if addresses != self._addresses or len(self._replays) > _MOST_REPLAYS:
            self._replays.clear()
            self._addresses = addresses

    def take(
        self, tensors: Iterable[NamedTensor], purpose: Purpose, *, first: bool, last: bool
    ) -> list[str]:
        """Load or compare a bucket. Returns one line for each problem.

        first and last mark the ends of a weight sync. The tensors' memory is not needed after the
        return.
        """
        parameters = dict(self._model.named_parameters())
        self.unknown = []
        if first:
            self._begin()
        watch = ParameterWatch(parameters, purpose == "compare", count_fills=self._pads)
        self._placements = []
        problems = self._watched(iter(tensors), watch)
        self._is_plain &= watch.outside.is_plain or purpose == "compare"
        if last:
            problems.extend(self._not_received(parameters))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return problems

    def _watched(self, tensors: Iterator[NamedTensor], watch: ParameterWatch) -> list[str]:
        """Feed the model's loader, which places each tensor before it asks for the next, so that
        each is seen alone."""
        problems: list[str] = []
        current: tuple[str, torch.Tensor] | None = None

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                other = self._other_half(name)
                if other is not None and other not in self._halves:
                    self._halves[name] = tensor.clone()  # its memory is not this process's own
                    continue
                current = (name, tensor)
                watch.start(tensor)
                if other is not None:
                    yield other, self._halves.pop(other)
                yield current
                both = name if other is None else f"{other} with {name}"
                problems.extend(self._settle(both, tensor, watch))
                self._placements.append(watch.placement)
                watch.start(None)
                current = None

        load = self._load_each if _lists_tensors_first(self._model) else self._model.load_weights
        while True:
            try:
                with watch:
                    load(feed())  # type: ignore[operator]
            except Exception as error:  # whatever a model's loader raises, report it to the sender
                if str(error):
                    reason = str(error).splitlines()[0]
                else:
                    reason = type(error).__name__
                if current is None:
                    problems.append(f"the engine's loader failed ({reason})")
                    break
                name, tensor = current
                self._count(name, tensor, watch)
                problems.append(
                    f"{name} of shape {list(tensor.shape)} does not fit the engine's parameter "
                    f"({reason})"
                )
                watch.start(None)
                current = None
            else:
                break
        return problems

    def _load_each(self, tensors: Iterator[NamedTensor]) -> None:
        """Give the model's loader one tensor at a time, a copy: gpt-oss's sets biases that a
        rank does not add to 0 in place, in memory that other ranks read."""
        for name, tensor in tensors:
            is_bias = tensor.dim() == 2 and name.endswith("_bias")
            self._model.load_weights([(name, tensor.clone() if is_bias else tensor)])  # type: ignore[operator]

    def _other_half(self, name: str) -> str | None:
        """The name of the tensor that the model's loader copies together with this one; None: it
        copies this one alone."""
        if not self._has_pairs:
            return None
        first, second = _PAIR
        if f".{second}." in name:
            return name.replace(second, first)
        return name.replace(first, second) if f".{first}." in name else None

    def _settle(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> list[str]:
        self._count(name, tensor, watch)
        watch.placement.written = watch.written
        watch.placement.source = _in_words(name, tensor)
        if not watch.written:
            self.unknown.append(f"{name} of shape {list(tensor.shape)} is not known to the engine")
            return self.unknown[-1:]
        if watch.differs:
            return [f"{name} differs"]
        return []

    def _count(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> None:
        self._written.update(watch.written)
        for parameter in watch.written:
            self._sources[parameter].append(_in_words(name, tensor))

    def _not_received(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        if self._pads:
            padding = {}
        else:
            padding = _vocabulary_padding(self._model)
        problems = []
        for name, tensor in parameters.items():
            size = tensor.numel() - padding.get(name, 0)
            if self._written[name] < size:
                sources = ", ".join(self._sources[name]) or "no tensor"
                problems.append(
                    f"{name} (the engine's name) was not sent in full: {self._written[name]} of "
                    f"{size} elements, from {sources}"
                )
        return problems


def _in_words(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {list(tensor.shape)}"


def _lists_tensors_first(model: torch.nn.Module) -> bool:
    """Whether a model's loader lists all tensors before it places the first."""
    return any(kind.__name__ == "GptOssForCausalLM" for kind in type(model).__mro__)


def _pads_dimensions(model: torch.nn.Module) -> bool:
    """Whether the engine rounded heads or the feed-forward size up, as it does on CPU
    (configs/update_config.py)."""
    config = getattr(model, "config", None)
    originals = (
        ("original_intermediate_size", "intermediate_size"),
        ("original_moe_intermediate_size", "moe_intermediate_size"),
        ("original_num_attention_heads", "num_attention_heads"),
        ("original_total_num_kv_heads", "num_key_value_heads"),
    )
    return any(
        getattr(config, original, None) not in (None, getattr(config, name, None))
        for original, name in originals
    )


def _vocabulary_padding(model: torch.nn.Module) -> dict[str, int]:
    """Elements of the engine's parameters that no checkpoint fills: the engine rounds vocabularies
    up."""
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        weight = getattr(module, "weight", None)
        if indices is not None and weight is not None:
            rows = (
                indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
            )
            padding[f"{name}.weight"] = rows * weight[0].numel()
    return padding
