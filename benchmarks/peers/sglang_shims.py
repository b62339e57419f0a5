"""Lets SGLang's cache be imported and run on a CPU; what is measured is its published code, unmodified.

Import this before anything of sglang. Inert stand-ins take the place of packages for GPUs, which it
imports and never calls on the measured paths, and of its model zoo. ``run_on_cpu`` replaces the four
things that need a GPU: streams and events, pinned memory, and the kernel that copies pages.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

ABSENT = frozenset(
    "torchvision sgl_kernel flashinfer cuda deep_gemm flash_attn compressed_tensors xgrammar llguidance outlines "
    "openai openai_harmony soundfile decord av timm modelscope datasets gguf mooncake pynvml torchao sgl_deep_ep "
    "tilelang cutlass quack kernels torch_memory_saver interegular blobfile tiktoken sentencepiece anthropic "
    "mistral_common build distro easydict py_spy torchaudio torchcodec multipart watchfiles tvm_ffi uvloop scipy "
    "zstandard nvshmem".split()
)
"""Packages that are not installed here."""

REPLACED = frozenset(
    {
        "sglang.srt.utils.hf_transformers.common",
        "sglang.srt.utils.hf_transformers_utils",
        "sglang.srt.configs.model_config",
        "sglang.srt.entrypoints.openai.protocol",
        "sglang.srt.constrained.base_grammar_backend",
    }
)
"""Modules of its model zoo and server, named for types only."""

BARE = ("sglang", "sglang.srt.configs", "sglang.srt.utils.hf_transformers")
"""Packages whose ``__init__`` loads the model zoo; their other modules are found in them as they are."""

HITS: set[str] = set()

class _Inert(type):
    """A class that has every attribute and does nothing: a type, a base class or a decorator."""

    def __getattr__(cls, name: str) -> _Inert:
        return _inert(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_inert" in cls.__dict__ and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator
        return super().__call__() if "_is_inert" in cls.__dict__ else super().__call__(*args, **kwargs)

    def __getitem__(cls, item: object) -> _Inert:
        return cls

    def __or__(cls, other: object) -> _Inert:
        return cls

    __ror__ = __or__


def _inert(name: str) -> _Inert:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return _Inert(name, (), {"_is_inert": True, "__call__": lambda self, *args, **kwargs: args[0] if args else None})


class _InertModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> _Inert:
        return _inert(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REPLACED or fullname.partition(".")[0] in ABSENT:
            HITS.add(fullname.partition(".")[0])
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _BarePackage(types.ModuleType):
    def __getattr__(self, name: str) -> _Inert:
        if self.__name__ == "sglang":
            raise AttributeError(name)
        return _inert(name)


def _install() -> None:
    sys.meta_path.insert(0, _Finder())
    for name in BARE:
        found = importlib.machinery.PathFinder.find_spec(name.rpartition(".")[2], _path_of_parent(name))
        assert found is not None
        package = _BarePackage(name)
        package.__path__ = list(found.submodule_search_locations or ())
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__
        sys.modules[name] = package


def _path_of_parent(name: str) -> list[str] | None:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return None
    return [f"{place}/{'/'.join(parent.split('.')[1:])}" for place in sys.modules["sglang"].__path__]


class _PassedEvent:
    """An event of a stream on which everything is done at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, *args: object) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream:
    """A stream on which everything is done at once."""

    def wait_stream(self, *args: object) -> None:
        pass

    def wait_event(self, *args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def run_on_cpu() -> None:
    """Replace what needs a GPU."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common, mha

    streams = SimpleNamespace(
        Event=_PassedEvent,
        Stream=_Stream,
        current_stream=lambda *args: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
        __name__="cpu",
    )
    cache_controller.device_module = l2_transfer.device_module = streams
    for module in (mha, common):
        module.ALLOC_MEMORY_FUNCS["cpu"] = _zeros
    mha.transfer_kv_direct = _copy_pages
    make_pool = mha.MHATokenToKVPoolHost.__init__

    def make_unpinned_pool(self: object, *args: object, **kwargs: object) -> None:
        make_pool(self, *args, **{**kwargs, "pin_memory": False})

    mha.MHATokenToKVPoolHost.__init__ = make_unpinned_pool


def _zeros(dims: Sequence[int], dtype: torch.dtype, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.zeros(dims, dtype=dtype)


def _copy_pages(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


_install()
