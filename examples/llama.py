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
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [
            {name: weights[f"model.layers.{layer}.{name}.weight"] for name in _LAYER_WEIGHTS}
            for layer in range(config.num_hidden_layers)
        ]

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
        weights = {
            "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
            "model.norm.weight": torch.ones(hidden),
        }
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
        positions = torch.arange(start, start + len(tokens))
        rotation = self._rotation(positions)
        # A token sees everything before it and itself.
        mask = torch.arange(start + len(tokens)) <= positions[:, None]
        x = embedding(tokens, self.embedding)
        for layer, w in enumerate(self.layers):
            h = self._rms_norm(x, w["input_layernorm"])
            q, k, v = (self._heads(h, w[f"self_attn.{each}_proj"]) for each in "qkv")
            k, v = context(layer, _rotate(k, *rotation), v)
            x = x + linear(_attend(_rotate(q, *rotation), k, v, mask), w["self_attn.o_proj"])
            h = self._rms_norm(x, w["post_attention_layernorm"])
            h = silu(linear(h, w["mlp.gate_proj"])) * linear(h, w["mlp.up_proj"])
            x = x + linear(h, w["mlp.down_proj"])
        return linear(self._rms_norm(x[-1], self.norm), self.embedding)

    def _heads(self, h: Tensor, weight: Tensor) -> Tensor:
        return linear(h, weight).unflatten(-1, (-1, self.config.head_dim))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding (Su et al. 2021), each (num_tokens, 1, head_dim)."""
        exponents = torch.arange(0, self.config.head_dim, 2) / self.config.head_dim
        angles = positions[:, None] / self.config.rope_theta**exponents
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


_LAYER_WEIGHTS = (
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


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))  # heads first, a batch of one
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
