"""A critic's values of a response, read with transformers, and tokens coloured by them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.text import Text

from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.token_classification import register
from vapo_megatron.training.losses import values_of

# Background colours from low to high, dark text on all of them.
_SHADES = ("#f28b82", "#f7b5ae", "#fbdcd8", "#eeeeee", "#d6e4fb", "#a8c7f7", "#7cabf2")
_INK = "#202124"


class ValueReader:
    """The critic of an export, on a GPU that the engine leaves free, or else on the CPU."""

    def __init__(
        self, directory: Path, config: ValueLossConfig, dtype: str, platform: Platform, taken: int
    ) -> None:
        """taken: GPUs of the engine, from 0.

        Raises:
            BadInput: transformers cannot load it.
        """
        from transformers import AutoModelForTokenClassification
        from transformers.utils import logging

        has_room = platform.is_cuda and platform.device_count() > taken
        self._device = torch.device("cuda", taken) if has_room else torch.device("cpu")
        self._config = config
        register()
        logging.disable_progress_bar()
        try:
            model = AutoModelForTokenClassification.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
            )
            self._model = model.to(self._device).eval()
        except Exception as error:  # transformers and CUDA raise many kinds
            raise BadInput(f"{directory}: its critic cannot be read ({reason_of(error)})") from None

    @torch.inference_mode()
    def values(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        """The value of the state before each token of the response."""
        ids = torch.tensor([[*prompt, *response]], device=self._device)
        outputs = self._model(input_ids=ids, use_cache=False).logits[0].float()
        before = outputs[len(prompt) - 1 : -1]
        return values_of(before, self._config).tolist()


def scale_of(
    values: Sequence[float], value_range: tuple[float, float] | None
) -> tuple[float, float]:
    """The values of the lowest and the highest colour: the run's returns, or where these are not
    bounded, what this response spans."""
    if value_range is not None and value_range[0] < value_range[1]:
        return value_range
    low, high = min(values, default=0.0), max(values, default=1.0)
    return low, high if high > low else low + 1.0


def coloured(texts: Sequence[str], values: Sequence[float], scale: tuple[float, float]) -> Text:
    """The text of a response, every token on the colour of its value."""
    line = Text()
    for text, value in zip(texts, values, strict=True):
        line.append(text, style=_style(value, scale))
    return line


def key_of_colours(scale: tuple[float, float]) -> Text:
    """A line that says which colour is which value."""
    low, high = scale
    line = Text()
    line.append("value of the state before a token: ", style="dim")
    for number, shade in enumerate(_SHADES):
        value = low + (high - low) * number / (len(_SHADES) - 1)
        line.append(f" {value:.2g} ", style=f"{_INK} on {shade}")
    return line


def _style(value: float, scale: tuple[float, float]) -> str:
    low, high = scale
    share = (value - low) / (high - low)
    place = round(share * (len(_SHADES) - 1))
    return f"{_INK} on {_SHADES[min(max(place, 0), len(_SHADES) - 1)]}"
