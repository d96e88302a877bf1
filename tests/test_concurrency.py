"""One saver, used by everybody at once: threads, event loops, callers that are cancelled or walk away."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import S3, Backend
from tests.support.checkpoints import at, chain, checkpoint, ids, listed, put
from tests.support.moto import store_options
from tests.support.processes import run
from tests.support.proxy import S3Proxy

pytestmark = pytest.mark.processes


def noise(seed: int, length: int = 5000) -> str:
    """Text that no compression makes small."""
    return "".join(map(chr, random.Random(seed).choices(range(32, 127), k=length)))


def new_at(number: int, step: int) -> Any:
    return checkpoint({"count": [number, step]}, version=f"{number}.{step}")


def branch(saver: LSMSaver, number: int, steps: int) -> list[str]:
    """A chain of one's own on the shared thread; whatever was stored is read back at once."""
    parent, stored = None, []
    for step in range(steps):
        made = new_at(number, step)
        config = saver.put(at("shared", parent), made, {"step": step}, made["channel_versions"])
        saver.put_writes(config, [("count", step)], f"task-{number}")
        kept = saver.get_tuple(config)
        assert kept.checkpoint["channel_values"] == {"count": [number, step]}
        assert kept.pending_writes == [(f"task-{number}", "count", step)]
        parent = made["id"]
        stored.append(parent)
    return stored


async def abranch(saver: LSMSaver, number: int, steps: int) -> list[str]:
    """The same for asyncio."""
    parent, stored = None, []
    for step in range(steps):
        made = new_at(number, step)
        config = await saver.aput(at("shared", parent), made, {"step": step}, made["channel_versions"])
        await saver.aput_writes(config, [("count", step)], f"task-{number}")
        kept = await saver.aget_tuple(config)
        assert kept.checkpoint["channel_values"] == {"count": [number, step]}
        assert kept.pending_writes == [(f"task-{number}", "count", step)]
        parent = made["id"]
        stored.append(parent)
    return stored


def test_threads_and_event_loops_share_a_saver_and_a_thread_id(backend: Backend) -> None:
    steps = 6
    with backend.open() as saver, backend.open() as other, ThreadPoolExecutor(7) as pool:

        def loop(first: int) -> list[list[str]]:
            async def side_by_side() -> list[list[str]]:
                return await asyncio.gather(*(abranch(saver, number, steps) for number in range(first, first + 4)))

            return asyncio.run(side_by_side())

        loops = [pool.submit(loop, first) for first in (100, 200, 300)]
        threads = [pool.submit(branch, saver, number, steps) for number in (1, 2, 3)]
        threads.append(pool.submit(branch, other, 4, steps))
        branches = [done for future in loops for done in future.result()] + [future.result() for future in threads]

        everything = sorted((one for done in branches for one in done), reverse=True)
        assert len(everything) == 16 * steps
        assert listed(saver, at("shared")) == everything
        assert listed(other, at("shared")) == everything
        for done in branches:
            kept = [other.get_tuple(at("shared", one)) for one in done]
            parents = [found.parent_config["configurable"]["checkpoint_id"] for found in kept[1:]]
            assert kept[0].parent_config is None
            assert parents == done[:-1]


@pytest.fixture
def slow(s3: S3) -> Iterator[tuple[S3Proxy, LSMSaver]]:
    """A saver on a store that takes its time, so that commits are under way for as long as a test needs."""
    with (
        S3Proxy(s3.server.endpoint) as proxy,
        LSMSaver.from_conn_string(s3.url(), store_options=store_options(proxy.endpoint)) as saver,
    ):
        saver.setup()
        yield proxy, saver


def commits(proxy: S3Proxy) -> int:
    return sum(request.conditional_write for request in list(proxy.requests))


async def under_way(proxy: S3Proxy) -> None:
    """Wait until a commit has left the saver."""
    async with asyncio.timeout(30):
        while not commits(proxy):  # noqa: ASYNC110 (counted in the proxy's thread: there is nothing to wait for)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("cancelled", [[0], [1, 4], [0, 1, 2, 3, 4, 5, 6], [7]], ids=str)
async def test_cancelled_callers_take_nobody_down(slow: tuple[S3Proxy, LSMSaver], cancelled: list[int]) -> None:
    # The first leads the commit, the others wait for theirs: whoever is cancelled, the rest are stored.
    proxy, saver = slow
    config = put(saver, at("thread"), {"a": 1})
    proxy.clear()
    proxy.delay = 0.1
    callers = [asyncio.create_task(saver.aput_writes(config, [("a", n)], f"task-{n}")) for n in range(8)]
    await under_way(proxy)
    for number in cancelled:
        callers[number].cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    proxy.delay = 0

    others = [number for number in range(8) if number not in cancelled]
    assert [outcomes[number] for number in others] == [None] * len(others)
    stored = {task for task, _, _ in (await saver.aget_tuple(config)).pending_writes}
    assert stored >= {f"task-{number}" for number in others}
    await saver.aput_writes(config, [("a", 9)], "task-9")
    assert ("task-9", "a", 9) in saver.get_tuple(config).pending_writes


async def test_a_caller_that_is_cancelled_again_and_again(slow: tuple[S3Proxy, LSMSaver]) -> None:
    proxy, saver = slow
    config = put(saver, at("thread"), {"a": 1})
    proxy.delay = 0.01
    dice = random.Random(1)
    kept = []
    for number in range(30):
        caller = asyncio.create_task(saver.aput_writes(config, [("a", number)], f"task-{number:02}"))
        await asyncio.sleep(dice.random() * 0.03)
        caller.cancel()
        if not isinstance((await asyncio.gather(caller, return_exceptions=True))[0], BaseException):
            kept.append(f"task-{number:02}")
    stored = [task for task, _, _ in (await saver.aget_tuple(config)).pending_writes]
    assert set(stored) >= set(kept)
    assert stored == sorted(set(stored))


def test_a_loop_that_ends_leaves_no_commit_without_a_leader(slow: tuple[S3Proxy, LSMSaver]) -> None:
    # A caller on an event loop leads; callers in threads wait for it; the loop is cancelled and gone.
    proxy, saver = slow
    config = put(saver, at("thread"), {"a": 1})
    proxy.clear()
    proxy.delay = 0.2
    started = threading.Event()

    async def lead_and_leave() -> None:
        leader = asyncio.create_task(saver.aput_writes(config, [("a", 0)], "leader"))
        await under_way(proxy)
        started.set()
        await asyncio.sleep(0.05)
        leader.cancel()

    with ThreadPoolExecutor(5) as pool:
        leaving = pool.submit(asyncio.run, lead_and_leave())
        assert started.wait(30)
        followers = [pool.submit(saver.put_writes, config, [("a", n)], f"task-{n}") for n in range(4)]
        leaving.result(30)
        for follower in followers:
            follower.result(30)
    stored = {task for task, _, _ in saver.get_tuple(config).pending_writes}
    assert stored >= {f"task-{number}" for number in range(4)}


ON_THE_LOOP = """
import asyncio
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, checkpoint, put
from tests.support.moto import store_options
from tests.support.proxy import S3Proxy

faulthandler.dump_traceback_later(40, exit=True)

async def main(proxy, saver):
    config = put(saver, at("thread"), {"a": 1})
    calls = {
        "get_tuple": lambda: saver.get_tuple(config),
        "list": lambda: list(saver.list(at("thread"))),
        "put_writes": lambda: saver.put_writes(config, [("a", -1)], "sync"),
        "put": lambda: put(saver, config, {"a": 2}),
        "flush": lambda: saver.flush("thread"),
    }
    for name, call in calls.items():
        proxy.requests.clear()
        proxy.delay = 0.1
        tasks = [
            asyncio.create_task(saver.aput_writes(config, [("a", n)], f"{name}-{n}")) for n in range(4)
        ]
        while not any(request.conditional_write for request in list(proxy.requests)):
            await asyncio.sleep(0.001)
        call()  # on the loop's own thread, which the four above need in order to go on
        await asyncio.gather(*tasks)
        proxy.delay = 0
    stored = {task for task, _, _ in saver.get_tuple(config).pending_writes}
    assert stored == {"sync"} | {f"{name}-{n}" for name in calls for n in range(4)}, stored
    assert len(list(saver.list(at("thread")))) == 2

with S3Proxy(ARGS["endpoint"]) as proxy:
    with LSMSaver.from_conn_string(ARGS["url"], store_options=store_options(proxy.endpoint)) as saver:
        asyncio.run(main(proxy, saver))
print("done")
"""


def test_sync_calls_on_an_event_loops_own_thread_do_not_deadlock(s3: S3) -> None:
    # In a process of its own: a deadlock here could not be broken from within.
    assert run(ON_THE_LOOP, {"endpoint": s3.server.endpoint, "url": s3.url()}, seconds=60).strip() == "done"


def test_a_list_sees_the_store_as_it_was_when_it_began(backend: Backend) -> None:
    with backend.open(compaction="off") as saver, backend.open(compaction="off") as other:
        configs = chain(saver, "thread", [{"text": noise(number)} for number in range(40)])
        saver.put_writes(configs[0], [("a", 1)], "task")
        found = saver.list(at("thread"))
        first = next(found)
        newest = put(other, configs[-1], {"text": "later"})
        other.put_writes(configs[0], [("b", 2)], "task-2")
        other.flush("thread")
        other.compact("thread")
        rest = list(found)
        assert [kept.checkpoint["id"] for kept in (first, *rest)] == ids(configs)[::-1]
        assert rest[-1].pending_writes == [("task", "a", 1)]
        assert rest[-1].checkpoint["channel_values"] == {"text": noise(0)}
        assert listed(saver, at("thread"))[0] == newest["configurable"]["checkpoint_id"]


def test_a_list_may_be_abandoned_half_way(backend: Backend) -> None:
    with backend.open() as saver:
        configs = chain(saver, "thread", [{"text": noise(number)} for number in range(40)])
        for _ in range(3):
            for kept in saver.list(at("thread")):
                saver.put_writes(kept.config, [("seen", True)], "task")  # while the iterator stands
                break
        abandoned = saver.list(at("thread"))
        assert next(abandoned).pending_writes == [("task", "seen", True)]
        del abandoned
        interleaved = [saver.list(at("thread")) for _ in range(3)]
        for expected in ids(configs)[::-1]:
            assert {next(one).checkpoint["id"] for one in interleaved} == {expected}
        assert listed(saver, at("thread"), limit=5) == ids(configs)[:-6:-1]


async def test_an_async_list_may_be_abandoned_half_way(backend: Backend) -> None:
    async with backend.open() as saver:
        configs = chain(saver, "thread", [{"text": noise(number)} for number in range(40)])
        async for kept in saver.alist(at("thread")):
            await saver.aput_writes(kept.config, [("seen", True)], "task")
            break
        found = saver.alist(at("thread"))
        assert (await anext(found)).pending_writes == [("task", "seen", True)]
        await found.aclose()
        assert [kept.checkpoint["id"] async for kept in saver.alist(at("thread"))] == ids(configs)[::-1]


async def test_a_list_that_is_cancelled_while_it_waits(slow: tuple[S3Proxy, LSMSaver]) -> None:
    proxy, saver = slow
    configs = chain(saver, "thread", [{"text": noise(number)} for number in range(12)])
    saver.flush("thread")
    proxy.delay = 0.1

    async def everything() -> list[Any]:
        return [kept async for kept in saver.alist(at("thread"))]

    reader = asyncio.create_task(everything())
    await asyncio.sleep(0.05)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    proxy.delay = 0
    assert [kept.checkpoint["id"] for kept in await everything()] == ids(configs)[::-1]


class Unserialisable:
    def __reduce__(self) -> Any:
        raise TypeError("this value does not serialise")


async def test_an_unserialisable_value_among_callers_that_wait(slow: tuple[S3Proxy, LSMSaver]) -> None:
    proxy, saver = slow
    config = put(saver, at("thread"), {"a": 1})
    proxy.clear()
    proxy.delay = 0.1
    leader = asyncio.create_task(saver.aput_writes(config, [("a", 0)], "task-0"))
    await under_way(proxy)
    values = {n: Unserialisable() if n in (2, 5) else n for n in range(1, 8)}
    callers = [saver.aput_writes(config, [("a", value)], f"task-{n}") for n, value in values.items()]
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    await leader
    assert [isinstance(outcome, TypeError) for outcome in outcomes] == [n in (2, 5) for n in values]
    expected = [(f"task-{n}", "a", n) for n in range(8) if n not in (2, 5)]
    assert (await saver.aget_tuple(config)).pending_writes == expected
