"""Fixtures of the hop tests: the page, its threads, and a hop in the middle of its work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hicache_async._hop import Hop, HopRegistry
from hicache_async._threads import DaemonThreads
from tests.hop.book import LIMIT_S, Book, Bugs


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def bugs() -> Bugs:
    return Bugs()


@pytest_asyncio.fixture
async def hops(bugs: Bugs) -> HopRegistry:
    return HopRegistry(asyncio.get_running_loop(), bugs.append)


@pytest_asyncio.fixture
async def threads(book: Book) -> AsyncIterator[DaemonThreads]:
    threads = DaemonThreads(2, name="test")
    yield threads
    book.finish.set()
    threads.shutdown()


@pytest_asyncio.fixture
async def hop(book: Book, hops: HopRegistry, threads: DaemonThreads) -> Hop[int]:
    """A hop whose thread is in the middle of the page."""
    book.take()
    hop = hops.start_job("fill", threads, book.fill, book.give_back)
    assert await asyncio.to_thread(book.writing.wait, LIMIT_S)
    return hop
