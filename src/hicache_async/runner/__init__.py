"""Embedding: a cache for engines that are not async."""

from .loop_runner import LoopRunner

__all__ = ["LoopRunner"]
