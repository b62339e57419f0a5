"""Sharing: in what two namespaces differ, and what to set so that both become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .manifest import Manifest

Facts = Mapping[str, object]

_UNIFIED_ORDER = "group_cell_layer_kv_token"
_HOST_LAYOUTS = {
    "layer_kv_token": "page_first",
    "kv_layer_token": "page_first_direct",
    "group_layer_kv_token": "head_grouped",
}
"""Order of a whole page's bytes: a host layout that gives it (layer_first gives the first one, too)."""

_LAYOUT = re.compile(r"(?P<order>[a-z_]+):(?P<widths>[0-9+]+)(?P<rest>(;[a-z_]+=[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that keeps two caches from sharing.

    Attributes:
        field: of the config, of the table ``kv`` that describes its tensors, or of the namespace.
        ours, theirs: its two values; None: there is none.
        advice: what to set on our side, or why that is no use.
    """

    field: str
    ours: object
    theirs: object
    advice: str

    def __str__(self) -> str:
        return f"{self.field} is {shown(self.ours)} here and {shown(self.theirs)} there"

    @property
    def can_be_shared(self) -> bool:
        """Whether a setting makes both equal; False: the bytes are really different."""
        return not self.advice.startswith(_NEVER)


_NEVER = "cannot be shared"


def differences(ours: Manifest, theirs: Manifest) -> tuple[Difference, ...]:
    """Return every field in which two namespaces differ, in the order of the fields."""
    mine, other = facts(ours), facts(theirs)
    names = dict.fromkeys((*mine, *other))
    if mine["key_scheme"] != other["key_scheme"]:  # then what else only one of them has says nothing more
        names = {name: None for name in names if name in mine and name in other and name != "host_layout"}
    return tuple(
        Difference(name, mine.get(name), other.get(name), _advice(name, mine, other))
        for name in names
        if not _same(mine.get(name), other.get(name))
    )


def nearest(ours: Manifest, others: Iterable[Manifest]) -> list[tuple[Manifest, tuple[Difference, ...]]]:
    """Return the others with their differences: what can be shared first, then what differs in least."""
    found = [(other, differences(ours, other)) for other in others]
    return sorted(found, key=lambda pair: (_num_never(pair[1]), len(pair[1]), pair[0].digest))


def facts(manifest: Manifest) -> dict[str, object]:
    """Return the fields of a namespace, with the byte order taken apart into what an operator sets.

    ``object_layout`` becomes ``key_scheme``, ``host_layout``, ``head_dims`` and the numbers that follow.
    """
    found = dict(manifest.fields)
    layout = _LAYOUT.fullmatch(str(found.get("object_layout", "")))
    found["key_scheme"] = None
    if layout is None:
        return found
    del found["object_layout"]
    order = layout["order"]
    found["key_scheme"] = "unified" if order == _UNIFIED_ORDER else "rank_suffix"
    if order != _UNIFIED_ORDER:
        found["host_layout"] = _HOST_LAYOUTS.get(order, order)
    found["head_dims"] = [int(width) for width in layout["widths"].split("+")]
    for pair in layout["rest"].split(";")[1:]:
        name, _, number = pair.partition("=")
        found[_LAYOUT_NUMBERS.get(name, name)] = int(number)
    return found


_LAYOUT_NUMBERS = {"layers": "total_layers", "tokens": "kv_page_size"}


def shown(value: object) -> str:
    """Return a field's value as an operator would write it."""
    if value is None:
        return "not there"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _same(ours: object, theirs: object) -> bool:
    return ours == theirs and type(ours) is type(theirs)


def _num_never(found: Iterable[Difference]) -> int:
    return sum(not difference.can_be_shared for difference in found)


# What to do about each


def _advice(name: str, ours: Facts, theirs: Facts) -> str:
    advise = _ADVICE.get(name)
    if advise is None:
        return f"{_NEVER}: {name} is of another version of hicache_async; run the same version on both sides"
    return advise(shown(theirs.get(name)), theirs)


def _of_head_group(value: str, theirs: Facts) -> str:
    total, group = theirs.get("total_kv_heads"), theirs.get("head_group")
    tp_size = total // group if isinstance(total, int) and isinstance(group, int) and group else "the same"
    if theirs["key_scheme"] == "unified":
        return f"set head_group = {value}, or tp_lcm_size = {tp_size}"
    return (
        f'its pages hold the heads of one rank, at tp_size = {tp_size}; run with that, or set key_scheme = "unified" '
        "and the same head_group on both sides, and store anew"
    )


def _of_layer_partition(value: str, theirs: Facts) -> str:
    if theirs["key_scheme"] == "unified":
        return f"set layer_partition = {value}"
    return (
        f"its pages hold the {value} layers of one rank; run with the same pp_size and num_layers, or set "
        'key_scheme = "unified" and the same layer_partition on both sides, and store anew'
    )


def _of_key_scheme(value: str, theirs: Facts) -> str:
    if theirs["key_scheme"] != "unified":
        return f"set key_scheme = {value} and host_layout = {shown(theirs.get('host_layout'))}"
    names = ("head_group", "layer_partition", "token_group", "total_layers")
    return f"set key_scheme = {value}" + "".join(f", {name} = {theirs.get(name)}" for name in names)


_ADVICE: dict[str, Callable[[str, Facts], str]] = {
    "schema_version": lambda value, _: (
        f"{_NEVER}: its format is version {value}; run the same version of hicache_async on both sides"
    ),
    "model_id": lambda value, _: f"set model_id = {value}, if it is the same model under another name",
    "fingerprint": lambda value, _: (
        f"set fingerprint = {value}, if revision, rope scaling and quantisation are the same there"
    ),
    "dtype": lambda value, _: (
        f"{_NEVER}: its bytes are {value}; run the engine with a KV cache of dtype {value}"
    ),
    "page_size": lambda value, _: f"set page_size = {value}, in the config and in the engine's tensors",
    "rank_replicated": lambda value, _: (
        f"{_NEVER}: a latent of MLA (mla = true) is not K and V (mla = false); it has mla = {value}"
    ),
    "total_kv_heads": lambda value, _: (
        f"set tp_size so that kv_heads x tp_size = {value}, or total_kv_heads = {value} where ranks hold copies of "
        "heads; another number of KV heads is another model"
    ),
    "head_group": _of_head_group,
    "layer_partition": _of_layer_partition,
    "key_scheme": _of_key_scheme,
    "host_layout": lambda value, _: (
        f"set host_layout = {value}" + (' and io_mode = "direct"' if "direct" in value else "")
    ),
    "head_dims": lambda value, _: f"{_NEVER}: a head has {value} elements there; it is another model",
    "total_layers": lambda value, _: f"set total_layers = {value}; another number of layers is another model",
    "token_group": lambda value, _: f"set token_group = {value}",
    "kv_page_size": lambda value, _: (
        "its pages are slices of a cp rank; run with the same cp_size, or set "
        'key_scheme = "unified" and the same token_group on both sides, and store anew'
    ),
    "codec": lambda value, _: (
        f"open the store as the others do, with codec {value}: by a prefix of its URL, as zstd+file:///data/kv"
        if value != '"raw"'
        else "open the store without a codec: take zstd+, fp8+ or aesgcm+ out of its URL"
    ),
}
"""By field: what returns the advice for their value, as shown, and all their facts."""
