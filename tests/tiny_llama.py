"""A random model of two layers, with the forward of the examples."""

from __future__ import annotations

from llama import Llama, LlamaConfig

MODEL = Llama.random(
    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
    )
)
