# mypy: disable-error-code="import-not-found"
"""Lets SGLang's cache be imported and run on a CPU; what is measured is its published code, unmodified.

Import this before anything of sglang. Inert stand-ins take the place of what it imports and never calls on
the measured paths; ``run_on_cpu`` replaces what needs a GPU: streams and events, pinned memory, and the
kernel that copies pages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

ABSENT = frozenset({"compressed_tensors", "gguf", "tvm_ffi"})
"""Packages that it imports and that are not installed."""

REPLACED = frozenset(
    {
        "sglang.srt.configs.model_config",
        "sglang.srt.constrained.base_grammar_backend",
        "sglang.srt.utils.hf_transformers.common",
    }
)
"""Modules of its model zoo and server, which the cache needs the names of."""

BARE = "sglang.srt.configs"
"""A package whose ``__init__`` loads the model zoo; its other modules are found in it as they are."""


class _Inert(type):
    """A class that stands for any class, constant or decorator."""

    def __getattr__(cls, name: str) -> _Inert:
        return _inert(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else cls


def _inert(name: str) -> _Inert:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Inert(name, (), {})


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> _Inert:
        return _inert(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_inert = fullname in REPLACED or fullname.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_inert else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _install() -> None:
    sys.meta_path.insert(0, _Finder())
    package = _InertModule(BARE)
    parent = importlib.import_module(BARE.rpartition(".")[0])
    package.__path__ = [f"{place}/configs" for place in parent.__path__]
    sys.modules[BARE] = package


class _Done:
    """A stream or an event: what was queued on it is done, and every method says so."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


def run_on_cpu() -> None:
    """Replace what needs a GPU."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common, mha

    streams = SimpleNamespace(
        Event=_Done,
        Stream=_Done,
        current_stream=_Done,
        stream=lambda stream: contextlib.nullcontext(),
        __name__="cpu",
    )
    cache_controller.device_module = l2_transfer.device_module = streams
    for module in (mha, common):
        module.ALLOC_MEMORY_FUNCS["cpu"] = _zeros
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_to_host
    make_pool = mha.MHATokenToKVPoolHost.__init__

    def make_unpinned_pool(self: object, *args: object, **kwargs: object) -> None:
        make_pool(self, *args, **{**kwargs, "pin_memory": False})

    mha.MHATokenToKVPoolHost.__init__ = make_unpinned_pool


def _zeros(dims: Sequence[int], dtype: torch.dtype, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.zeros(dims, dtype=dtype)


def _copy_to_host(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    # From planes of (token, head, dim), those of K before those of V, to (page, layer, token, head, dim) of each.
    pages = dst_indices[::page_size] // page_size
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        of_kind, layer = divmod(number, num_layers)
        dst_ptrs[of_kind][pages, layer] = source[src_indices].view(-1, page_size, *source.shape[1:])


_install()
