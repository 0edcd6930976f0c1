"""A model in Megatron's own checkpoint format, torch_dist, with a card that describes it.

A saved model is a directory:

    .metadata, *.distcp, common.pt, metadata.json    what megatron.core.dist_checkpointing reads
    model.json                                       the card: family, head, dtype, numbers of the
    model hf/                                              a Hugging Face directory without its
    weights

The keys are the keys of GPTModel.sharded_state_dict() without prefix: no layout (tensor, pipeline,
virtual pipeline, expert parallel) shows in them, nor whether Transformer Engine fuses norms into
linear layers. There may also be keys that begin with "optimizer.". For a model with adapters only
these and a critic's head are saved; the card then names the weights that they belong to.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.transformer.module import MegatronModule
from pydantic import TypeAdapter, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.files import atomic_write, cannot_write, parse_json
from vapo_megatron.models.model_files import CARD_FILE
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import adapter_entries, sharded_adapters
from vapo_megatron.weights.carried import CarriedSource, carried_of
from vapo_megatron.weights.hf_writer import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, copy_carried
from vapo_megatron.weights.mapping import ADAPTER, Entry, entries, unwrapped

HF_FOLDER = "hf"
FORMAT = 1
OPTIMIZER_PREFIX = "optimizer."

# Errors of loading an unfit or damaged checkpoint; torch's, raised on all ranks together, is not an
# Exception.
LOAD_ERRORS = (CheckpointException, CheckpointingException, OSError, KeyError, ValueError)
# Megatron-LM writes this with its own checkpoints of this kind; it says how to read the keys.
CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class ModelCard:
    """Describes a saved model. spec.dtype is the source directory's, dtype
    the saved parameters'; hf_dir has config.json, tokenizer and so on, without weights. For
    adapters: their config, and base, which identifies the frozen weights
        (adapters.base_identity). carried: tensors of the model that are not trained."""

    spec: ModelSpec
    head: Head
    dtype: str
    hf_dir: Path
    base: str | None = None
    adapter: AdapterConfig | None = None
    carried: CarriedSource | None = None

    @property
    def entries(self) -> list[Entry]:
        """The parameters of the saved model, without its optimizer."""
        if self.adapter is None:
            return entries(self.spec, self.head)
        trained_head = map(Entry, self.spec.head_rules("value") if self.head == "value" else ())
        return [*adapter_entries(self.spec, self.adapter), *trained_head]


def write_model_card(
    folder: Path,
    spec: ModelSpec,
    head: Head,
    hf_dir: Path,
    dtype: str,
    base: tuple[str, AdapterConfig] | None = None,
) -> None:
    """Write model.json and hf/ into a saved model's folder, which is made if it is not there: see
    ModelCard. hf_dir: config.json, generation config, tokenizer and chat template are copied from
    here. Raises BadInput where a file cannot be written."""
    card = {
        "format": FORMAT,
        "family": spec.family,
        "head": head,
        "dtype": dtype,
        "spec": spec.facts(),
    }
    card |= {} if base is None else {"base": base[0], "adapter": base[1].model_dump(mode="json")}
    if carried := carried_of(hf_dir, spec):
        card["carried"] = {"path": str(carried.path), "digest": carried.digest}
    try:
        copy_carried(hf_dir, folder / HF_FOLDER, (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES))
    except OSError as error:
        raise cannot_write(folder / HF_FOLDER, error) from None
    with atomic_write(folder / CARD_FILE) as file:
        json.dump(card, file, indent=2)
        file.write("\n")


def read_model_card(folder: Path) -> ModelCard:
    """The card of a saved model. Raises BadInput where it is missing, unreadable or of another
    format."""
    path = folder / CARD_FILE
    if not folder.is_dir():
        raise BadInput(
            f"{folder}: no such directory; give a model saved by training or convert-hf-to-megatron"
        )
    try:
        card = parse_json(path.read_text(encoding="utf-8"))
        if card["format"] != FORMAT:
            raise BadInput(
                f"{path}: format {card['format']!r}, expected {FORMAT}: use the version that wrote "
                "it"
            )
        spec = read_spec(
            folder / HF_FOLDER,
            vocab_divisible_by=card["spec"]["vocab_divisible_by"],
            value_outputs=card["spec"]["value_outputs"],
            converting=True,
        )
        # hf/ has the config.json of the model that the run started from, whatever its dtype was.
        return ModelCard(
            spec=replace(spec, dtype=card["spec"]["dtype"]),
            head=TypeAdapter(Head).validate_python(card["head"]),
            dtype=str(card["dtype"]),
            hf_dir=folder / HF_FOLDER,
            base=card.get("base"),
            adapter=AdapterConfig.model_validate(card["adapter"]) if "base" in card else None,
            carried=_read_carried(card.get("carried", card.get("vision"))),
        )
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; {folder} is not a model saved by training or "
            "convert-hf-to-megatron"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; save the model again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path}: cannot be read ({type(error).__name__}: {error}); save the model again"
        ) from None


def _read_carried(held: dict[str, str] | None) -> CarriedSource | None:
    """held: under "vision" in files of earlier versions."""
    return None if held is None else CarriedSource(Path(held["path"]), held["digest"])


def model_state(chunks: Sequence[Module]) -> dict[str, Any]:
    """The sharded state dict of a model: for megatron.core.dist_checkpointing's save and load.

    Its tensors are the parameters themselves. What Transformer Engine calls extra state (scales of
    FP8 recipes that keep some) is left out: a checkpoint of a machine without it has none.

    Args:
        chunks: this rank's, one a virtual pipeline stage, wrapped in DistributedDataParallel or
            not.

    Returns:
        {"model0": the first chunk's, "model1": ...}; these names do not show in the saved
        keys.
    """
    state = {}
    for index, chunk in enumerate(map(unwrapped, chunks)):
        groups = chunk.pg_collection
        for module in chunk.modules():
            # Megatron asks its global state, which is not set up here, where a module does not say
            # its own.
            if isinstance(module, MegatronModule) and not hasattr(module, "tp_group"):
                module.tp_group = groups.tp
        with _data_parallel_rank(groups.dp_cp.rank()):
            sharded = chunk.sharded_state_dict(
                metadata=CONTENT_METADATA
                | {
                    "dp_cp_group": groups.dp_cp,
                    "non_homogeneous_layers": not chunk.layers_are_uniform,
                }
            )
        if adapters := sharded_adapters(chunk):
            names = _trained(chunk)
            sharded = {key: value for key, value in sharded.items() if key in names} | adapters
        state[f"model{index}"] = {
            key: value for key, value in sharded.items() if not _is_extra(key)
        }
    return state


def put_model_state(chunks: Sequence[Module], state: dict[str, Any]) -> None:
    """Fill the chunks from dist_checkpointing.load of model_state(chunks). Raises RunFailed where
    they differ."""
    for index, chunk in enumerate(map(unwrapped, chunks)):
        missing, unexpected = chunk.load_state_dict(state[f"model{index}"], strict=False)
        if any(ADAPTER in key for key in state[f"model{index}"]):
            missing = [key for key in missing if key in _trained(chunk)]
        wrong = [key for key in (*missing, *unexpected) if not _is_extra(key)]
        if wrong:
            raise RunFailed(
                f"Megatron parameter {wrong[0]}: in the checkpoint or in the model, expected in "
                "both"
            )


def load_reason(error: BaseException) -> str:
    """Why a load failed with one of LOAD_ERRORS, in one line: the error of the first rank that
    failed."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return " ".join(str(failures[0][0] if failures else error).split())[:300]


def _trained(chunk: Module) -> set[str]:
    return {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}


def _is_extra(key: str) -> bool:
    return "_extra_state" in key.rpartition(".")[2]


@contextmanager
def _data_parallel_rank(rank: int) -> Iterator[None]:
    """Set Megatron's global data-parallel rank, which tied embeddings read on a last stage."""
    before = parallel_state._MPU_DATA_PARALLEL_RANK
    parallel_state.set_data_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_data_parallel_rank(before)
