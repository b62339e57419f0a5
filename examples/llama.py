"""A Llama forward pass over paged K/V, small enough to read in one go.

It computes one chunk of one sequence and leaves the K/V of the whole sequence where the engine keeps
it: the engine hands in an ``attend`` function that is called once per layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

ContextKV = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new k, new v) -> (k, v) of the whole context, each (num_tokens, kv_heads, head_dim)."""


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that shape a Llama model; names as in a Hugging Face ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0


class Llama:
    """A Llama model with tied embeddings.

    Args:
        config: the shape.
        weights: by Hugging Face name, float32.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = weights

    @classmethod
    def load(cls, directory: Path) -> Llama:
        """Read ``config.json`` and ``model.safetensors``."""
        from safetensors.torch import load_file

        raw = json.loads((directory / "config.json").read_text())
        raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
        config = LlamaConfig(**{name: raw[name] for name in LlamaConfig.__dataclass_fields__})
        return cls(config, load_file(directory / "model.safetensors"))

    @classmethod
    def random(cls, config: LlamaConfig, seed: int = 0) -> Llama:
        """Build a model of random weights: it says nothing sensible, but the same thing every time."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        weights = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden), "model.norm.weight": torch.ones(hidden)}
        for layer in range(config.num_hidden_layers):
            parts = {
                "input_layernorm": torch.ones(hidden),
                "self_attn.q_proj": matrix(queries, hidden),
                "self_attn.k_proj": matrix(keys, hidden),
                "self_attn.v_proj": matrix(keys, hidden),
                "self_attn.o_proj": matrix(hidden, queries),
                "post_attention_layernorm": torch.ones(hidden),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }
            weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()}
        return cls(config, weights)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int, context: ContextKV) -> Tensor:
        """Compute tokens [start, start + len(tokens)) of a sequence.

        Args:
            tokens: int64 (num_new,).
            start: position of the first of them.
            context: takes the new K/V of a layer and returns the layer's K/V of the whole sequence so far.
        Returns: the logits behind the last token, float32 (vocab_size,).
        """
        config, weights = self.config, self.weights
        positions = torch.arange(start, start + len(tokens))
        rotation = self._rotation(positions)
        # A new token sees everything before it and itself.
        mask = torch.arange(start + len(tokens)) <= positions[:, None]
        x = embedding(tokens, weights["model.embed_tokens.weight"])
        for layer in range(config.num_hidden_layers):
            w = {n: weights[f"model.layers.{layer}.{n}.weight"] for n in _LAYER}
            h = self._norm(x, w["input_layernorm"])
            x = x + linear(self._attend(layer, h, w, rotation, mask, context), w["self_attn.o_proj"])
            h = self._norm(x, w["post_attention_layernorm"])
            x = x + linear(silu(linear(h, w["mlp.gate_proj"])) * linear(h, w["mlp.up_proj"]), w["mlp.down_proj"])
        x = self._norm(x[-1], weights["model.norm.weight"])
        return linear(x, weights["model.embed_tokens.weight"])

    def _attend(
        self,
        layer: int,
        h: Tensor,
        w: Mapping[str, Tensor],
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        context: ContextKV,
    ) -> Tensor:
        def heads(name: str) -> Tensor:
            return linear(h, w[f"self_attn.{name}_proj"]).unflatten(-1, (-1, self.config.head_dim))

        q = _rotate(heads("q"), *rotation)
        k, v = context(layer, _rotate(heads("k"), *rotation), heads("v"))
        out = scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, each (num_tokens, 1, head_dim); Su et al. 2021."""
        exponents = torch.arange(0, self.config.head_dim, 2) / self.config.head_dim
        angles = positions[:, None] / self.config.rope_theta**exponents
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
