"""DeviceKV: the engine's own K and V tensors, checked once and seen as pages of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..errors import ConfigError

_SHAPES = (
    "(num_pages, page_size, kv_heads, head_dim), or with page_size given (num_tokens, kv_heads, head_dim)"
)
_MLA_SHAPES = (
    "(num_pages, page_size, 1, dim), (num_pages, page_size, dim), "
    "or with page_size given (num_tokens, 1, dim) or (num_tokens, dim)"
)


@dataclass(slots=True, eq=False, repr=False, kw_only=True, weakref_slot=True)
class DeviceKV:
    """The device pages of one engine. Build it with :meth:`from_layers`.

    Attributes:
        num_layers, num_pages: how many; page ids are 0 .. num_pages-1.
        page_size: tokens of one page.
        dtype: logical dtype by name, as ``bfloat16``.
        kv_heads: heads of K and V on this rank; MLA: 1.
        head_dims: elements of one head of K and of V; MLA: of the latent vector.
        is_mla: there is one latent plane instead of K and V.
        plane_nbytes: bytes of one page of one layer, per plane.
        page_nbytes: bytes of one page, all layers, K and V.
        reserved_pages: pages that the engine keeps for itself.
        compute_stream: what the engine's forward runs on, if its device has streams.
        device: where the tensors are.

    **Ownership**: the engine owns the bytes; nothing here copies or frees them.
    """

    num_layers: int
    num_pages: int
    page_size: int
    dtype: str
    kv_heads: int
    head_dims: tuple[int, ...]
    is_mla: bool
    plane_nbytes: tuple[int, ...]
    page_nbytes: int
    reserved_pages: tuple[int, ...]
    compute_stream: object | None
    device: torch.device
    _planes: tuple[tuple[torch.Tensor, ...], ...]

    @classmethod
    def from_layers(
        cls,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor] | None = None,
        *,
        page_size: int | None = None,
        compute_stream: object | None = None,
        reserved_pages: Sequence[int] = (),
    ) -> Self:
        """Describe an engine's tensors, one of K and one of V per layer.

        Args:
            k, v: per layer (num_pages, page_size, kv_heads, head_dim) or (num_tokens, kv_heads,
                head_dim), any dtype. K and V may differ in head_dim. ``v=None`` is MLA: one latent
                plane, whose head axis may be left out. A page must be contiguous; the pages of a
                tensor need not follow each other.
            page_size: tokens; required for shapes without a page axis.
            compute_stream: what the engine's forward runs on.
            reserved_pages: page ids that the cache never uses, such as a padding page.
        Raises:
            ConfigError: what is wrong with which layer.
        """
        if page_size is not None and (isinstance(page_size, bool) or page_size < 1):
            raise ConfigError(f"page_size is {page_size!r}; it must be an integer >= 1")
        sides = [("k", list(k))] if v is None else [("k", list(k)), ("v", list(v))]
        _check_counts(sides)
        named = [[(f"{side}[{i}]", layer) for i, layer in enumerate(layers)] for side, layers in sides]
        paged = [
            [(name, _as_pages(name, tensor, page_size, is_mla=v is None)) for name, tensor in layers]
            for layers in named
        ]
        _check_alike(paged)
        first = paged[0][0][1]
        planes = [[_as_bytes(name, pages) for name, pages in layers] for layers in paged]
        plane_nbytes = tuple(layers[0].shape[1] for layers in planes)
        num_pages = first.shape[0]
        return cls(
            num_layers=len(planes[0]),
            num_pages=num_pages,
            page_size=first.shape[1],
            dtype=str(first.dtype).removeprefix("torch."),
            kv_heads=first.shape[2],
            head_dims=tuple(layers[0][1].shape[3] for layers in paged),
            is_mla=v is None,
            plane_nbytes=plane_nbytes,
            page_nbytes=len(planes[0]) * sum(plane_nbytes),
            reserved_pages=_checked_reserved(reserved_pages, num_pages),
            compute_stream=compute_stream,
            device=first.device,
            _planes=tuple(zip(*planes, strict=True)),
        )

    def __repr__(self) -> str:
        return (
            f"<DeviceKV {self.num_layers} layers x {self.num_pages} pages x {self.page_size} tokens, "
            f"{self.kv_heads} heads of {self.head_dims}, {self.dtype} on {self.device}>"
        )

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the uint8 planes of ``layer``, each (num_pages, plane_nbytes), not copied."""
        return self._planes[layer]


def _check_counts(sides: list[tuple[str, list[torch.Tensor]]]) -> None:
    for side, layers in sides:
        if not layers:
            raise ConfigError(f"{side} is empty; give one tensor per layer")
    counts = {side: len(layers) for side, layers in sides}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"k has {counts['k']} layers and v has {counts['v']}; give as many of both")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}; give a torch.Tensor")
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{name} is {tensor.layout} on {tensor.device}; give a dense tensor that has memory"
        )
    if tensor.requires_grad:
        raise ConfigError(f"{name} requires grad; give a tensor that does not, as tensor.detach()")
    if 0 in tensor.shape:
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; every dimension must be at least 1")


def _as_pages(name: str, tensor: torch.Tensor, page_size: int | None, *, is_mla: bool) -> torch.Tensor:
    """View one layer as (num_pages, page_size, kv_heads, head_dim)."""
    _check_tensor(name, tensor)
    shape = tuple(tensor.shape)
    wanted = _MLA_SHAPES if is_mla else _SHAPES
    if is_mla:
        tensor = _with_head_axis(tensor)
    if tensor.dim() not in (3, 4):
        raise ConfigError(f"{name} has shape {shape}; give {wanted}")
    if is_mla and tensor.shape[-2] != 1:
        raise ConfigError(
            f"{name} has {tensor.shape[-2]} kv_heads in shape {shape} and v is None, which is MLA and has 1; "
            "give v, or for K and V in one tensor a view of each"
        )
    if tensor.dim() == 3:
        if page_size is None:
            raise ConfigError(
                f"page_size is None and {name} has shape {shape}, without a page axis; give page_size"
            )
        if shape[0] % page_size:
            raise ConfigError(f"{name} has {shape[0]} tokens; it must be a multiple of page_size {page_size}")
        return tensor.view(shape[0] // page_size, page_size, *tensor.shape[1:])
    if page_size is not None and tensor.shape[1] != page_size:
        raise ConfigError(
            f"page_size is {page_size} and {name} has shape {shape}, whose page_size is {tensor.shape[1]}; "
            f"give {wanted}"
        )
    return tensor


def _with_head_axis(tensor: torch.Tensor) -> torch.Tensor:
    """Add the head axis that a latent tensor may leave out.

    Three dimensions mean (num_tokens, 1, dim) when the middle one is 1, else (num_pages, page_size, dim);
    where page_size is 1 both are the same bytes.
    """
    if tensor.dim() == 2:
        return tensor.unsqueeze(1)
    if tensor.dim() == 3 and tensor.shape[1] != 1:
        return tensor.unsqueeze(2)
    return tensor


def _check_alike(sides: list[list[tuple[str, torch.Tensor]]]) -> None:
    """Compare every layer with k[0], and its head_dim with the first layer of its own side."""
    first_name, first = sides[0][0]
    for layers in sides:
        own_name, own = layers[0]
        for name, pages in layers:
            for field, value, right, right_name in (
                ("dtype", pages.dtype, first.dtype, first_name),
                ("device", pages.device, first.device, first_name),
                ("num_pages", pages.shape[0], first.shape[0], first_name),
                ("page_size", pages.shape[1], first.shape[1], first_name),
                ("kv_heads", pages.shape[2], first.shape[2], first_name),
                ("head_dim", pages.shape[3], own.shape[3], own_name),
            ):
                if value != right:
                    raise ConfigError(f"{name} has {field} {value}; it must be {right}, as {right_name} has")


def _as_bytes(name: str, pages: torch.Tensor) -> torch.Tensor:
    """View (num_pages, page_size, kv_heads, head_dim) as uint8 (num_pages, plane_nbytes)."""
    num_pages, numel = pages.shape[0], pages[0].numel()
    if not pages[0].is_contiguous():
        raise ConfigError(
            f"{name} has strides {pages.stride()} for shape {tuple(pages.shape)}; "
            "the bytes of a page must be contiguous in the order (token, head, dim)"
        )
    if num_pages > 1 and pages.stride(0) < numel:
        raise ConfigError(
            f"{name} has page stride {pages.stride(0)}; its pages overlap; give at least {numel} elements"
        )
    return pages.as_strided((num_pages, numel), (pages.stride(0), 1)).view(torch.uint8)


def _checked_reserved(reserved_pages: Sequence[int], num_pages: int) -> tuple[int, ...]:
    reserved = tuple(int(page) for page in reserved_pages)
    for page in reserved:
        if not 0 <= page < num_pages:
            raise ConfigError(f"reserved_pages names page {page}; pages are 0 .. {num_pages - 1}")
    if len(set(reserved)) != len(reserved):
        raise ConfigError(f"reserved_pages is {reserved}; it names a page twice")
    if len(reserved) == num_pages:
        raise ConfigError(f"reserved_pages names all {num_pages} pages; leave at least 1 to the cache")
    return reserved
