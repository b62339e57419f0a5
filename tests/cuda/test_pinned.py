"""Pinned memory: registered in chunks off the loop, never left pinned, refused in words that help."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.config import HostLayout, IoMode
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.pieces import copy_runs
from hicache_async.cuda.pinned import PinnedMemory
from hicache_async.errors import ConfigError, InvariantError
from hicache_async.memory.layout import PageRun, sorted_runs
from hicache_async.testing._device_bench import Bench, device_page
from tests.cuda.fake_cuda import FakeCuda

CHUNK = 4096
NEVER = threading.Event()


def allocate(nbytes: int) -> tuple[FakeCuda, PinnedMemory, np.ndarray]:
    cuda = FakeCuda()
    cuda.end()
    pinned = PinnedMemory(cuda, CHUNK)
    return cuda, pinned, pinned.allocate(nbytes, NEVER)


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 7])
def test_chunks_cover_the_buffer_and_meet_at_the_cuts(nbytes: int) -> None:
    """Every byte is in exactly one registration, and a cut is where one ends and the next begins."""
    cuda, pinned, memory = allocate(nbytes)
    start = memory.ctypes.data
    places = sorted(cuda.registered.items())
    assert places[0][0] == start and sum(size for _, size in places) == nbytes == pinned.nbytes
    assert all(at + size == following for (at, size), (following, _) in itertools.pairwise(places))
    assert list(pinned.cuts) == [at for at, _ in places[1:]]


def test_it_is_unpinned_when_it_is_dropped() -> None:
    """By whoever drops the last view; other buffers stay."""
    cuda, pinned, memory = allocate(3 * CHUNK)
    other = pinned.allocate(2 * CHUNK, NEVER)
    tensor = torch.from_numpy(memory)[5:]
    del memory
    gc.collect()
    assert len(cuda.registered) == 5, "a view still reads it"
    del tensor
    gc.collect()
    assert sorted(cuda.registered) == [other.ctypes.data, other.ctypes.data + CHUNK]
    assert list(pinned.cuts) == [other.ctypes.data + CHUNK]
    pinned.release()
    pinned.release()
    assert not cuda.registered and pinned.nbytes == 0 and not pinned.cuts


def test_a_refusal_says_how_much_and_what_the_limit_is() -> None:
    """And nothing of it stays pinned."""
    cuda = FakeCuda()
    cuda.end()
    cuda.refuse_beyond = 2 * CHUNK
    pinned = PinnedMemory(cuda, CHUNK)
    with pytest.raises(ConfigError) as refused:
        pinned.allocate(5 * CHUNK, NEVER)
    for word in (str(5 * CHUNK), str(2 * CHUNK), "out of memory", "ulimit -l", "host_bytes"):
        assert word in str(refused.value)
    assert not cuda.registered and not pinned.cuts


def test_it_may_be_collected_at_any_moment() -> None:
    """Also in a thread that is just changing the books of the same device."""
    cuda, pinned, memory = allocate(2 * CHUNK)
    with pinned._lock:
        del memory
        gc.collect()
    assert not cuda.registered and pinned.nbytes == 0


def test_what_is_abandoned_is_kept() -> None:
    """Dropped or not, it stays pinned, and its memory is nobody else's."""
    cuda, pinned, memory = allocate(3 * CHUNK)
    kept = weakref.ref(memory)
    pinned.abandon()
    del memory
    gc.collect()
    assert kept() is not None and len(cuda.registered) == 3


def test_what_may_be_in_use_for_ever_stays_pinned_at_exit(tmp_path: Path) -> None:
    """Memory is unpinned before the interpreter exits; unless it was abandoned, and then the exit waits for nobody."""
    script = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from tests.cuda.fake_cuda import FakeCuda
from hicache_async.cuda.pinned import PinnedMemory

class Said(FakeCuda):
    def unregister(self, address):
        print("unpinned", flush=True)
        super().unregister(address)

cuda = Said()
pinned = PinnedMemory(cuda, 4096)
memory = pinned.allocate(3 * 4096, threading.Event())
if sys.argv[1] == "abandon":
    pinned.abandon()
print("exit", flush=True)
"""
    for how, said in (("keep", ["exit"] + ["unpinned"] * 3), ("abandon", ["exit"])):
        command = [sys.executable, "-c", script, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert ended.stdout.split() == said, ended.stderr


async def pinned_off_the_loop() -> FakeCuda:
    cuda = FakeCuda()
    device = CudaDevice(runtime=cuda)
    await device.host_buffer(10 * CHUNK)
    await device.aclose()
    cuda.end()
    return cuda


def test_pinning_is_no_work_of_the_loop() -> None:
    """A thread of the device does it."""
    assert asyncio.run(pinned_off_the_loop()).registering_threads == {"hicache-pin-1"}


def test_a_cancelled_allocation_stops_at_the_next_chunk_and_leaves_nothing() -> None:
    """The thread looks between chunks; what it had pinned goes with the memory."""
    cuda = FakeCuda()
    cuda.end()
    cancelled = threading.Event()
    register = cuda.register

    def register_and_cancel(address: int, nbytes: int) -> None:
        register(address, nbytes)
        if len(cuda.registered) == 2:
            cancelled.set()

    cuda.register = register_and_cancel  # type: ignore[method-assign]
    memory = PinnedMemory(cuda, CHUNK).allocate(50 * CHUNK, cancelled)
    assert len(cuda.registered) == 2
    del memory
    gc.collect()
    assert not cuda.registered


# Pieces


@given(st.data())
def test_pieces_are_few_whole_and_never_across_a_cut(data: st.DataObject) -> None:
    """Whatever pages, strides and cuts: the bytes are right, and no piece lies across."""
    num_pages, nbytes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    gaps = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    planes = [
        torch.randint(0, 256, (num_pages * (nbytes + gap),), dtype=torch.uint8).as_strided(
            (num_pages, nbytes), (nbytes + gap, 1)
        )
        for gap in gaps
    ]
    source, target = planes
    count = data.draw(st.integers(0, num_pages))
    sources = np.array(data.draw(st.permutations(range(num_pages)))[:count], np.int64)
    targets = np.array(data.draw(st.permutations(range(num_pages)))[:count], np.int64)
    start = source.data_ptr()
    last = num_pages * (nbytes + gaps[0])
    cuts = sorted(start + cut for cut in data.draw(st.sets(st.integers(0, last), max_size=4)))
    expected = target.clone()
    expected[targets] = source[sources]
    pieces: list[tuple[int, int]] = []

    def copy(given: torch.Tensor, taken: torch.Tensor) -> None:
        assert given.is_contiguous() and taken.is_contiguous() and given.shape == taken.shape
        pieces.append((taken.data_ptr(), taken.numel()))
        given.copy_(taken)

    runs = sorted_runs(sources, targets)
    copy_runs(copy, source, target, runs, cuts)
    assert torch.equal(target, expected)
    assert not [cut for at, size in pieces for cut in cuts if at < cut < at + size]
    if not cuts:
        assert len(pieces) == (len(runs) if gaps == (0, 0) else count)


def test_runs_are_found_whatever_the_order() -> None:
    """Pages that follow each other on both sides are one run though they are named backwards."""
    backwards = np.array([7, 6, 5, 2, 1], np.int64)
    assert sorted_runs(backwards, backwards + 10) == [PageRun(1, 11, 2), PageRun(5, 15, 3)]


def test_planes_that_are_cut_take_a_kernel() -> None:
    """The config never pairs them with direct; a plan that does is a bug."""
    plane = torch.zeros(4, 6, dtype=torch.uint8)
    with pytest.raises(InvariantError, match="whole planes"):
        copy_runs(lambda given, taken: None, plane.view(4, 2, 3), plane, [PageRun(0, 0, 1)], ())


async def copied_across_registrations() -> tuple[list[int], FakeCuda]:
    cuda = FakeCuda()
    device = CudaDevice(runtime=cuda)
    device._pinned = PinnedMemory(cuda, 40)  # a plane of a page takes 32 bytes
    tiers = await Bench(device, "cpu").tiers(HostLayout.LAYER_FIRST, io_mode=IoMode.DIRECT)
    offloaded = tiers.plan([0, 1, 2, 3, 7], [4, 5, 6, 7, 9])
    await device.wait(device.device_to_host(offloaded, ()))
    tiers.check({}, dict(zip([4, 5, 6, 7, 9], map(device_page, [0, 1, 2, 3, 7]), strict=True)))
    await device.aclose()
    cuda.end()
    return cuda.pieces, cuda


def test_a_copy_is_cut_where_registrations_meet() -> None:
    """CUDA refuses one that lies across two; the stand-in does, too."""
    pieces, _ = asyncio.run(copied_across_registrations())
    assert max(pieces) <= 40 and len(pieces) > 6 * 2
