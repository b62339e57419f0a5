"""The engine of the demo, with a model of two random layers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch
from llama import ContextKV, Llama
from paged_engine import Answer, PagedEngine, PagedKV

from hicache_async import Books, CacheConfig, Device, HiCache
from hicache_async.testing.virtual_device import NotReadyError, VirtualDevice
from tests.tiny_llama import MODEL

PAGE_SIZE = 8


class GatedModel(Llama):
    """The model, stopping between its layers while the gate is shut."""

    def __init__(self) -> None:
        vars(self).update(vars(MODEL))
        self.in_mid_forward = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, tokens: torch.Tensor, start: int, context: ContextKV) -> torch.Tensor:
        def gated(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if layer == 1:
                self.in_mid_forward.set()
                assert self.gate.wait(30)
            return context(layer, k, v)

        return super().forward(tokens, start, gated)

    async def shut_in_mid_forward(self) -> None:
        """Shut the gate and wait until a forward stands before it."""
        self.gate.clear()
        self.in_mid_forward.clear()
        await asyncio.to_thread(self.in_mid_forward.wait, 30)


@contextlib.asynccontextmanager
async def open_engine(
    num_pages: int = 64,
    *,
    model: Llama = MODEL,
    device: Device | None = None,
    store: Path | None = None,
    reuse: bool = True,
) -> AsyncIterator[PagedEngine]:
    config = CacheConfig(
        page_size=PAGE_SIZE,
        host_reserve_bytes=0,
        write_policy="write_through",
        prefetch_policy="wait_complete",
        prefetch_threshold_tokens=PAGE_SIZE,
    )
    kv = PagedKV(model.config, num_pages, PAGE_SIZE)
    url = None if store is None else f"file://{store}"
    async with (
        HiCache.open(config, kv=kv.device_kv(), device=device, store=url) as cache,
        PagedEngine(model, kv, cache, reuse=reuse) as engine,
    ):
        yield engine
        await cache.admin.flush()
        cache.audit()


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(97, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


async def recompute(prompts: Sequence[list[int]], max_tokens: int = 6) -> list[list[int]]:
    """Return the answers of an engine that reuses nothing and has one request at a time."""
    async with open_engine(reuse=False) as engine:
        return [(await engine.generate("alone", prompt, max_tokens=max_tokens)).tokens for prompt in prompts]


def test_a_reused_prefix_gives_the_very_bits_of_a_recomputed_one() -> None:
    """A prefix that comes into other pages, a layer only when it is asked for, leads to the same logits."""
    prompt = torch.tensor(random_prompt(61, seed=1))
    recomputed, reused = PagedKV(MODEL.config, 8, PAGE_SIZE), PagedKV(MODEL.config, 8, PAGE_SIZE)
    there, here = torch.tensor([3, 0, 7, 5, 1, 6, 2, 4]), torch.tensor([6, 7, 0, 2, 4, 1, 3, 5])

    def compute(kv: PagedKV, pages: torch.Tensor, start: int, ready: Callable[[int], None]) -> torch.Tensor:
        for first in range(start, len(prompt), PAGE_SIZE):
            chunk = prompt[first : first + PAGE_SIZE]
            logits = MODEL.forward(chunk, first, kv.context(pages, first, first + len(chunk), ready))
        return logits

    def bring(layer: int) -> None:
        reused.k[layer][here[:5]] = recomputed.k[layer][there[:5]]
        reused.v[layer][here[:5]] = recomputed.v[layer][there[:5]]

    expected = compute(recomputed, there, 0, lambda layer: None)
    assert torch.equal(compute(reused, here, 5 * PAGE_SIZE, bring), expected)


def test_chunks_add_up_to_one_forward_over_the_whole_prompt() -> None:
    """The K/V of earlier chunks means what it would mean within one chunk."""
    prompt = torch.tensor(random_prompt(61, seed=1))
    kv, pages = PagedKV(MODEL.config, 16, PAGE_SIZE), torch.arange(8)
    whole = MODEL.forward(prompt, 0, lambda layer, k, v: (k, v))
    for first in range(0, 61, PAGE_SIZE):
        chunk = prompt[first : first + PAGE_SIZE]
        logits = MODEL.forward(chunk, first, kv.context(pages, first, first + len(chunk), lambda layer: None))
    torch.testing.assert_close(logits, whole)


@pytest.mark.asyncio
async def test_interleaved_requests_answer_as_one_by_one() -> None:
    """What a request answers does not depend on who shares its batch."""
    prompts = [random_prompt(length, seed=length) for length in (5, 16, 23, 40, 64)]
    async with open_engine() as engine:
        answers = await asyncio.gather(
            *(engine.generate(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts))
        )
    assert [answer.tokens for answer in answers] == await recompute(prompts)
    assert len({tuple(answer.tokens) for answer in answers}) == 5


@pytest.mark.asyncio
async def test_more_requests_than_pages_are_all_answered() -> None:
    """A request that finds no room waits for one that leaves."""
    prompts = [random_prompt(30, seed=seed) for seed in range(9)]
    async with open_engine(num_pages=11) as engine:  # each takes five
        answers = await asyncio.gather(
            *(engine.generate(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts))
        )
    assert [answer.tokens for answer in answers] == await recompute(prompts)


async def _answer_from_each_tier(store: Path, prompt: list[int], other: list[int]) -> list[Answer]:
    answers = []
    async with open_engine(num_pages=8, store=store) as engine:

        async def push_out_with(*seeds: int) -> None:
            for seed in seeds:
                await engine.generate(f"other {seed}", [seed, *other], max_tokens=1)

        answers.append(await engine.generate("cold", prompt, max_tokens=6))
        answers.append(await engine.generate("device", prompt, max_tokens=6))
        await push_out_with(1)
        answers.append(await engine.generate("host", prompt, max_tokens=6))
        await push_out_with(2, 3, 4)
        answers.append(await engine.generate("store", prompt, max_tokens=6))
    async with open_engine(num_pages=8, store=store) as engine:
        answers.append(await engine.generate("restart", prompt, max_tokens=6))
    return answers


@pytest.mark.asyncio
async def test_a_prefix_from_any_tier_gives_the_same_answer(tmp_path: Path) -> None:
    """Device, host, store and a new cache over the store give the answer of recomputing."""
    prompt, other = random_prompt(45, seed=1), random_prompt(56, seed=2)
    answers = await _answer_from_each_tier(tmp_path, prompt, other)
    assert [answer.tokens for answer in answers] == await recompute([prompt]) * 5
    assert [answer.books for answer in answers] == [
        Books(prompt=45, device=0, host=0, store=0, computed=45),
        Books(prompt=45, device=40, host=0, store=0, computed=5),
        Books(prompt=45, device=0, host=40, store=0, computed=5),
        Books(prompt=45, device=0, host=0, store=40, computed=5),
        Books(prompt=45, device=0, host=0, store=40, computed=5),
    ]


@pytest.mark.asyncio
async def test_no_layer_is_read_before_it_has_been_loaded() -> None:
    """The forward asks for each layer of a loaded prefix; a device that is late says that it did."""
    device = VirtualDevice(auto=True)
    prompt = random_prompt(45, seed=1)
    with pytest.raises(NotReadyError):
        async with open_engine(num_pages=8, device=device) as engine:
            await engine.generate("cold", prompt, max_tokens=1)
            await engine.generate("other", random_prompt(57, seed=2), max_tokens=1)
            device.auto = False
            host_hit = asyncio.create_task(engine.generate("host", prompt, max_tokens=1))
            await asyncio.wait([host_hit])
            device.auto = True
            device.advance_all()
            await host_hit


@pytest.mark.asyncio
@pytest.mark.parametrize("first_hangs_up", [False, True])
async def test_equal_cold_prompts_are_computed_once(first_hangs_up: bool) -> None:
    """Of 32 equal cold prompts one computes, another goes on if it leaves, and no page is computed twice."""
    prompt = random_prompt(60, seed=3)
    computed: list[int] = []
    model = GatedModel()
    async with open_engine(256, model=model) as engine:
        engine.on_computed = computed.append
        clients = [asyncio.create_task(engine.generate(f"r{i}", prompt, max_tokens=1)) for i in range(32)]
        if first_hangs_up:
            await model.shut_in_mid_forward()
            clients[0].cancel()
            model.gate.set()
        answers = await asyncio.gather(*clients[first_hangs_up:])
    # Each computes the four tokens behind the last whole page.
    assert sum(computed) == 56 + 4 * len(answers)
    assert [answer.tokens for answer in answers] == await recompute([prompt], max_tokens=1) * len(answers)


@pytest.mark.asyncio
async def test_who_hangs_up_in_mid_forward_writes_into_nobody_elses_pages() -> None:
    """The pages of a running batch stay with it until the step is over, so a loaded prefix stays whole."""
    model = GatedModel()
    prompt, others = random_prompt(41, seed=4), random_prompt(41, seed=5)
    async with open_engine(num_pages=6, model=model) as engine:
        expected = await engine.generate("first", prompt, max_tokens=6)
        hangs_up = asyncio.create_task(engine.generate("hangs up", others, max_tokens=6))
        await model.shut_in_mid_forward()
        hangs_up.cancel()
        again = asyncio.create_task(engine.generate("again", prompt, max_tokens=6))
        await asyncio.wait([hangs_up])
        await engine.cache.admin.flush()  # what could be loaded by now would have been
        assert engine.cache.stats().device.leased == 6
        model.gate.set()
        assert (await again).tokens == expected.tokens


@pytest.mark.asyncio
async def test_a_cancelled_engine_gives_pages_back_when_its_thread_has_ended() -> None:
    """Cancelling the engine's loop in mid-forward leaves its pages alone until the forward is over."""
    model = GatedModel()
    async with open_engine(num_pages=6, model=model) as engine:
        client = asyncio.create_task(engine.generate("r", random_prompt(41, seed=6), max_tokens=6))
        await model.shut_in_mid_forward()
        engine._loop.cancel()
        await asyncio.wait([engine._loop, client])
        assert client.cancelled()
        with engine.cache.match_prefix("next", random_prompt(41, seed=7)) as lease:
            loading = await lease.load(total_tokens=48)
            assert loading.reserved_tokens == 0
            model.gate.set()
            allocation = await lease.allocate(total_tokens=48)
            assert len(allocation.pages) == 6
