"""Manifests: what comes back is what was written, and nothing else is believed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_async.core.keys import Namespace, namespace_of
from hicache_async.core.manifest import (
    MANIFEST_NBYTES,
    Manifest,
    decode,
    encode,
    is_manifest_key,
    manifest_key,
    manifest_of,
)
from hicache_async.errors import ConfigError

NAMESPACE = Namespace(
    model_id="llama/3 ü",
    fingerprint="rev-1",
    dtype="bfloat16",
    page_size=64,
    rank_replicated=False,
    total_kv_heads=8,
    head_group=2,
    layer_partition=16,
    object_layout="layer_kv_token:128+128",
    codec="raw",
)


def padded(fields: object) -> bytes:
    """Return any JSON as an object of the size of a manifest."""
    return json.dumps(fields).encode().ljust(MANIFEST_NBYTES)


def test_a_manifest_comes_back() -> None:
    """What was encoded is decoded under its own digest, from an object of exactly 4096 bytes of readable JSON."""
    data = encode(NAMESPACE)
    assert len(data) == MANIFEST_NBYTES == 4096
    assert json.loads(data)["model_id"] == "llama/3 ü"
    manifest = decode(NAMESPACE.digest, memoryview(bytearray(data)))
    assert manifest == manifest_of(NAMESPACE)
    assert manifest is not None and manifest.model_id == "llama/3 ü"
    assert manifest.fields == msgspec.to_builtins(NAMESPACE)


def test_the_key_tells_the_namespace() -> None:
    """A manifest's key is in the namespace that it describes, and no key of a page is taken for one."""
    key = manifest_key(NAMESPACE.digest)
    assert key == f"manifest_{NAMESPACE.digest}"
    assert is_manifest_key(key) and namespace_of(key) == NAMESPACE.digest
    assert not is_manifest_key(f"{'0' * 64}_{NAMESPACE.digest}_llama")


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_a_changed_field_is_not_believed(field: str) -> None:
    """A manifest of which one field was edited no longer has the digest of its key."""
    fields = msgspec.to_builtins(NAMESPACE)
    value = fields[field]
    fields[field] = (
        not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + "x"
    )
    assert decode(NAMESPACE.digest, padded(fields)) is None


def test_a_manifest_under_another_name_is_not_believed() -> None:
    """The same bytes under the digest of another namespace say nothing."""
    other = msgspec.structs.replace(NAMESPACE, page_size=32)
    assert decode(other.digest, encode(NAMESPACE)) is None
    assert decode(other.digest, encode(other)) is not None


def test_fields_of_a_later_version_are_kept() -> None:
    """A namespace with more fields, and another format's prefix, is believed by its own digest and kept whole."""

    class Later(Namespace, frozen=True, kw_only=True):
        attention: str = "gqa"

    later = Later(**{**msgspec.to_builtins(NAMESPACE), "schema_version": 2})
    digest = later.digest.replace("ukv1-", "ukv2-")
    manifest = decode(digest, padded(msgspec.to_builtins(later)))
    assert manifest is not None
    assert manifest.fields["attention"] == "gqa"
    assert decode(NAMESPACE.digest, padded(msgspec.to_builtins(later))) is None


def test_what_does_not_fit_is_refused() -> None:
    """Fields of more than 4096 bytes are refused, naming the lengths; the longest that fit come back."""
    with pytest.raises(ConfigError, match=r"holds 4096; shorten model_id \(5000 letters\)"):
        encode(msgspec.structs.replace(NAMESPACE, model_id="m" * 5000))
    room = MANIFEST_NBYTES - len(encode(NAMESPACE).rstrip())
    largest = msgspec.structs.replace(NAMESPACE, fingerprint="rev-1" + "x" * room)
    assert decode(largest.digest, encode(largest)) == manifest_of(largest)
    with pytest.raises(ConfigError):
        encode(msgspec.structs.replace(largest, fingerprint=largest.fingerprint + "x"))


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
@example(b"[" * 4096)
@example(b'{"a":' * 800)
@example(b'{"a": 1e999}')
@example(b'{"a": 123456789012345678901234567890}')
@example(b'{"model_id": "\\ud800"}')
@example(b"\xff\xfe{}")
@example(b"null")
@example(b"")
def test_nothing_unreadable_raises(data: bytes) -> None:
    """Whatever stands there instead of a manifest is none, and never an exception."""
    assert decode(NAMESPACE.digest, data) is None


@given(st.integers(0, 8 * MANIFEST_NBYTES - 1))
def test_a_flipped_bit_is_never_another_namespace(bit: int) -> None:
    """One bit flipped anywhere leaves the same fields, where it was padding, or no manifest."""
    data = bytearray(encode(NAMESPACE))
    data[bit // 8] ^= 1 << bit % 8
    assert decode(NAMESPACE.digest, data) in (None, manifest_of(NAMESPACE))


def test_a_model_id_that_is_no_text_is_none() -> None:
    """A later version may say whose KV it is in another way; then this one does not know."""
    assert Manifest("ukv9-0", {"model_id": 5}).model_id is None
    assert Manifest("ukv9-0", {}).model_id is None
