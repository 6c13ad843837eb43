"""What scripts written for diffusers 0.17 import and newer versions lack: `randn_tensor`, and adapters as attention
processors."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """In a child: puts both where such scripts look for them. Adapters start without zeros, on every rank alike."""
    import diffusers.models.attention_processor as processors
    import diffusers.utils
    from diffusers.utils.torch_utils import randn_tensor

    diffusers.utils.randn_tensor = randn_tensor  # type: ignore[attr-defined]
    processors.LoRAAttnProcessor = _adapter_class()  # type: ignore[misc]


def _adapter_class() -> type:
    import torch
    from torch import nn

    drawn = torch.Generator().manual_seed(1)

    class Adapter(nn.Module):
        """Low-rank additions to the four projections of an attention layer, in the precision of their own weights."""

        def __init__(self, hidden_size: int, cross_attention_dim: int | None = None, rank: int = 4) -> None:
            super().__init__()
            inner = {"q": hidden_size, "k": cross_attention_dim or hidden_size, "v": cross_attention_dim or hidden_size}
            self.down = nn.ModuleDict()
            self.up = nn.ModuleDict()
            for name, size in (inner | {"out": hidden_size}).items():
                self.down[name] = nn.Linear(size, rank, bias=False)
                self.up[name] = nn.Linear(rank, hidden_size, bias=False)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.08)

        def forward(
            self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, attention_mask: Any = None,
            **other: Any,
        ) -> Any:  # fmt: skip
            """As the layer's own attention without a mask, with what the adapters add."""
            text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            inputs = {"q": hidden_states, "k": text, "v": text}
            base = {"q": attn.to_q, "k": attn.to_k, "v": attn.to_v}
            q, k, v = (
                (base[name](x) + self._add(name, x)).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
                for name, x in inputs.items()
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).to(q.dtype)
            return attn.to_out[1](attn.to_out[0](mixed) + self._add("out", mixed))

        def _add(self, name: str, x: Any) -> Any:
            own = self.down[name].weight.dtype
            return self.up[name](self.down[name](x.to(own))).to(x.dtype)

    return Adapter
