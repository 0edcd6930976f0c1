"""Attention sinks in SGLang's torch attention, which gpt-oss needs on a machine without a GPU: each
head has a score beside its keys' scores, without a value."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Forward = Callable[..., torch.Tensor]


def install_sinks(backend: Any) -> None:
    """Let SGLang's TorchNativeAttnBackend take sinks, and its check of gpt-oss let that pass."""
    from sglang.srt.arg_groups import model_hook

    backend.forward_extend = _remembering_sinks(backend.forward_extend)
    backend.forward_decode = _remembering_sinks(backend.forward_decode)
    backend._run_sdpa_forward_extend = _with_sinks(backend._run_sdpa_forward_extend, decodes=False)
    backend._run_sdpa_forward_decode = _with_sinks(backend._run_sdpa_forward_decode, decodes=True)
    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        # Backends with sinks are listed there by name.
        "triton" if name == "torch_native" else name
        for name in backends_of(view)
    )


def attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention of a request: query [n, heads, d], keys [m, kv_heads, d], values [m, kv_heads, e],
    visible bool [n, m], sinks [heads] -> [n, heads, e]."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.to(query.dtype).repeat_interleave(group, 1)
    values = values.to(query.dtype).repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys).float() * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    column = sinks.float()[:, None, None].expand(-1, len(query), 1)
    weights = F.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    return torch.einsum("hnm,mhe->nhe", weights.to(query.dtype), values)


def _remembering_sinks(forward: Forward) -> Forward:
    """Takes a layer's sinks, for the attention that it calls."""

    def run(self: Any, *args: Any, sinks: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        self.sinks = sinks
        return forward(self, *args, **named)

    return run


def _with_sinks(attend: Forward, decodes: bool) -> Forward:
    """Attention request by request where a layer has sinks; otherwise as it is."""

    def run(
        self: Any, query: torch.Tensor, output: torch.Tensor, *cache: Any, **options: Any
    ) -> torch.Tensor:
        if getattr(self, "sinks", None) is None:
            return attend(self, query, output, *cache, **options)
        k_cache, v_cache, req_to_token, rows, lengths = cache[:5]
        new_tokens = torch.ones_like(lengths) if decodes else cache[6]
        window = options["sliding_window_size"]
        start = 0
        for row, length, new in zip(
            rows.tolist(), lengths.tolist(), new_tokens.tolist(), strict=True
        ):
            slots = req_to_token[row, :length].long()
            at = torch.arange(length - new, length)[:, None]
            keys_at = torch.arange(length)
            visible = keys_at <= at
            if window is not None:
                visible &= keys_at >= at - window
            output[start : start + new] = attend_with_sinks(
                query[start : start + new],
                k_cache[slots],
                v_cache[slots],
                visible,
                options["scaling"],
                self.sinks,
            )
            start += new
        return output

    return run
