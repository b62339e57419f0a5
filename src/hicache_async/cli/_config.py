"""The config that the doctor examines: the options of a cache, and its tensors described instead of made."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import CacheConfig
from ..core.keys import KeyNames, key_names
from ..errors import ConfigError
from ._problem import Problem

_EXAMPLE = """\
model_id = "llama"
page_size = 64

[kv]
num_layers = 32
kv_heads = 8
head_dim = 128
dtype = "bfloat16"
"""
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_KV_FIELDS = ("num_layers", "kv_heads", "head_dim", "head_dims", "dtype", "page_size", "mla")


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What keys depend on of an engine's tensors, on one rank; see :class:`DeviceKV`."""

    num_layers: int
    page_size: int
    dtype: str
    kv_heads: int
    head_dims: tuple[int, ...]
    is_mla: bool


@dataclass(frozen=True, slots=True)
class Examined:
    """A config as read from a file."""

    config: CacheConfig
    shape: TensorShape

    def names(self, codec: str) -> KeyNames:
        """Return how a cache with this config names its objects in a store with ``codec``.

        Raises: NamespaceError: the shape does not fit the config.
        """
        return key_names(self.config, self.shape, codec=codec)


def read_config(path: str) -> Examined:
    """Read a TOML or JSON file.

    Raises: Problem: it cannot be read, or an option or the table kv is wrong.
    """
    try:
        options = _parse(path)
        kv = options.pop("kv", None)
        config = CacheConfig.from_mapping(options)
        return Examined(config, _shape(kv, config.page_size))
    except ConfigError as error:
        raise Problem(f"{path}: {error}") from error


def _parse(path: str) -> dict[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"cannot read the config {path!r}: {error}; give a TOML or JSON file") from error
    is_json = text.lstrip().startswith("{")
    try:
        found = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "TOML"
        raise Problem(f"{path} is not {kind}: {error}; this is one:\n{_EXAMPLE}") from error
    return dict(found)


def _shape(kv: object, page_size: int) -> TensorShape:
    if not isinstance(kv, Mapping):
        raise ConfigError(
            f"it has no table kv, which describes the engine's tensors on one rank; as here:\n{_EXAMPLE}"
        )
    for name in kv:
        if name not in _KV_FIELDS:
            raise ConfigError(f"kv.{name} is not known; the table kv has {', '.join(_KV_FIELDS)}")
    is_mla = kv.get("mla", False)
    if not isinstance(is_mla, bool):
        raise ConfigError(f"kv.mla is {is_mla!r}; give true or false")
    dtype = kv.get("dtype")
    if dtype not in _DTYPES:
        raise ConfigError(f"kv.dtype is {dtype!r}; give one of {', '.join(_DTYPES)}")
    return TensorShape(
        num_layers=_number("num_layers", kv.get("num_layers")),
        page_size=_number("page_size", kv.get("page_size", page_size)),
        dtype=str(dtype),
        kv_heads=_number("kv_heads", kv.get("kv_heads", 1 if is_mla else None)),
        head_dims=_head_dims(kv, is_mla=is_mla),
        is_mla=is_mla,
    )


def _head_dims(kv: Mapping[object, object], *, is_mla: bool) -> tuple[int, ...]:
    if ("head_dim" in kv) == ("head_dims" in kv):
        raise ConfigError(
            "kv needs head_dim, elements of a head, or head_dims = [of K, of V] where they differ"
        )
    if "head_dim" in kv:
        return (_number("head_dim", kv["head_dim"]),) * (1 if is_mla else 2)
    dims = kv["head_dims"]
    count = 1 if is_mla else 2
    if not isinstance(dims, list) or len(dims) != count:
        raise ConfigError(
            f"kv.head_dims is {dims!r}; give a list of {count}: {'the latent' if is_mla else 'K and V'}"
        )
    return tuple(_number("head_dims", dim) for dim in dims)


def _number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"kv.{name} is {value!r}; give an integer >= 1, of one rank")
    return value
