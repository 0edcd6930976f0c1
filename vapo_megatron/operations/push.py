"""`vapo-megatron push`: a model that a run has exported, with its card, to the Hugging Face Hub."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vapo_megatron.checkpoint.checkpoints import FINAL, final_step, latest_checkpoint
from vapo_megatron.checkpoint.manifest import check_model
from vapo_megatron.config.hub import repository_of
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.tokenizer import load_tokenizer
from vapo_megatron.errors import BadInput, RunFailed, TryAgain, reason_of
from vapo_megatron.evaluation.model_card import write_card
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.console import stage_bars
from vapo_megatron.operations.exports import chosen_export, exports_of, kind_of_run
from vapo_megatron.weights.adapters import PEFT_CONFIG
from vapo_megatron.weights.convert import megatron_to_hf
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.torch_dist import read_model_card

Model = Literal["actor", "critic", "actor_adapter"]


@dataclass(frozen=True)
class Pushed:
    """The result: the files sent, and their address."""

    folder: Path
    url: str


def push_model(
    run_dir: Path,
    target: str,
    checkpoint: str,
    model: Model,
    presets: Path,
    *,
    private: bool,
    update: bool,
    dry_run: bool,
    note: Callable[[str], None],
) -> Pushed:
    """Send one model of a run, in one commit.

    Args:
        target: hub:OWNER/NAME.
        checkpoint: name of an export; "": final, or else the newest. A run without any gets one of
            its newest checkpoint.
        private: of a repository that is made.
        update: whether a repository that holds files already gets a further commit.
        dry_run: check and write the card, and send nothing.
        note: prints a line.

    Raises:
        BadInput: the run is none or has no such export, the export is incomplete, target or login
            is wrong, or the repository holds other files; nothing was sent.
        RunFailed, TryAgain: the Hub refused, or did not answer.
    """
    repository = repository_of(target)
    config = _config(run_dir, presets)
    if not exports_of(run_dir) and not checkpoint and model == "actor":
        _export(run_dir, config, note)
    folder = chosen_export(run_dir, checkpoint) / model
    _check(run_dir, folder, model)
    card = write_card(run_dir, folder, config, _evaluations(run_dir, folder))
    if _lacks_licence(card):
        note(f"{card}: the licence of the base model is not known; add it to the card")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    note(f"{folder}: {size / 2**30:.2f} GiB to {repository}")
    if dry_run:
        return Pushed(folder, "nothing was sent (--dry-run)")
    url = _send(folder, repository, f"{config.run.name}, {folder.parent.name}", private, update)
    return Pushed(folder, url)


def _lacks_licence(card: Path) -> bool:
    """Whether a card does not know its base model's licence."""
    return "licence is not stated" in card.read_text(encoding="utf-8", errors="replace")


def _config(run_dir: Path, presets: Path) -> TrainConfig | SftConfig:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise BadInput(f"{run_dir}: no run directory (it has no config.yaml); give one")
    kind = kind_of_run(path)
    if kind not in (TrainConfig, SftConfig):
        raise BadInput(f"{run_dir}: is an evaluation, which has no model: give the run it is of")
    config = load_config(kind, path, [], presets)
    assert isinstance(config, TrainConfig | SftConfig)
    return config


def _export(run_dir: Path, config: TrainConfig | SftConfig, note: Callable[[str], None]) -> None:
    """Export the policy of the newest checkpoint."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None or not (checkpoint / "actor").is_dir():
        return  # chosen_export names the missing part
    out = run_dir / "hf" / checkpoint.name / "actor"
    note(f"exporting {checkpoint} to {out}")
    source = checkpoint / "actor"
    check_model(source)
    base = None
    if read_model_card(source).adapter is not None:
        base = Path(config.model.path)
    with stage_bars() as progress:
        megatron_to_hf(source, out, progress, base=base)


def _check(run_dir: Path, folder: Path, model: Model) -> None:
    """Raises BadInput where a model is incomplete."""
    mark = PEFT_CONFIG if model == "actor_adapter" else "config.json"
    if not (folder / mark).is_file():
        raise BadInput(f"{folder}: holds no {mark}: the run has exported no {model} there")
    if folder.parent.name == FINAL and final_step(run_dir) is None:
        raise BadInput(
            f"{folder.parent}: was not written to its end (it has no valid step.json): start the "
            "run again with run.resume=auto"
        )
    if model == "actor_adapter":
        if not (folder / "adapter_model.safetensors").is_file():
            raise BadInput(f"{folder}: holds no adapter_model.safetensors: export it again")
        return
    outputs = 1
    if model == "critic":
        outputs = len(json.loads((folder / mark).read_text(encoding="utf-8")).get("id2label", "1"))
    spec = read_spec(folder, value_outputs=outputs)
    if model == "critic":
        check_weights(folder, spec, "value", value_head="saved")
    else:
        check_weights(folder, spec, "lm")
    load_tokenizer(folder)


def _evaluations(run_dir: Path, folder: Path) -> list[dict[str, Any]]:
    """Results of `vapo-megatron evaluate --checkpoint` on this export, which stand beside the
    run."""
    found = []
    if folder.name == "actor":
        path = run_dir.resolve().parent / f"{run_dir.resolve().name}_{folder.parent.name}"
        file = path / "evaluation.json"
        if file.is_file():
            try:
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except ValueError:
                raise BadInput(f"{file}: cannot be read as JSON; evaluate again") from None
    return found


def _send(folder: Path, repository: str, message: str, private: bool, update: bool) -> str:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    api = huggingface_hub.HfApi()
    if huggingface_hub.get_token() is None:
        raise BadInput(
            f"hub:{repository}: no login: run `hf auth login`, or set HF_TOKEN to a token that may "
            "write"
        )
    try:
        try:
            held = set(api.list_repo_files(repository)) - {".gitattributes"}
        except RepositoryNotFoundError:
            held = set()
        if held and not update:
            raise BadInput(
                f"hub:{repository}: holds {len(held)} files already ({min(held)}): choose another "
                "name, or give --update for a further commit"
            )
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise BadInput(
                f"hub:{repository}: your token may not write there (HTTP {status}): check the "
                "owner, or log in with another token"
            ) from None
        kind = TryAgain if status >= 500 else RunFailed
        raise kind(f"hub:{repository}: was refused: {reason_of(error)[:300]}") from None
    except (OSError, httpx.HTTPError) as error:
        raise TryAgain(
            f"hub:{repository}: cannot be reached ({reason_of(error)[:200]}): try again; nothing "
            "or the whole commit is there"
        ) from None
    return str(commit.commit_url)
