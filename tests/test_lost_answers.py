"""The network between saver and store fails: nothing is lost, nothing is stored twice, no caller hears of it.

A proxy in front of a real S3 server loses requests, loses the answers of writes that were done, and answers with
the errors that S3 gives under load. Each test asserts that its faults did happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import S3
from tests.support.checkpoints import at, chain, ids, listed, put
from tests.support.moto import store_options
from tests.support.proxy import Answer, Fault, Request, Rule, S3Proxy

SLOW_DOWN = Answer(503, "SlowDown")
INTERNAL_ERROR = Answer(500, "InternalError")
TOO_MANY_REQUESTS = Answer(429, "TooManyRequests")
CONFLICT = Answer(409, "ConditionalRequestConflict")
FAULTS = [Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, SLOW_DOWN, INTERNAL_ERROR, TOO_MANY_REQUESTS, CONFLICT]


def name_of(fault: Fault | Answer) -> str:
    return fault.name if isinstance(fault, Fault) else str(fault.status)


@pytest.fixture
def proxy(s3: S3) -> Iterator[S3Proxy]:
    with S3Proxy(s3.server.endpoint) as running:
        yield running


@pytest.fixture
def connect(s3: S3, proxy: S3Proxy) -> Iterator[Callable[[], LSMSaver]]:
    """Opens savers on one store, through the proxy."""
    url = s3.url()
    opened: list[LSMSaver] = []

    def connect() -> LSMSaver:
        opened.append(LSMSaver.from_conn_string(url, store_options=store_options(proxy.endpoint)))
        return opened[-1]

    yield connect
    for saver in opened:
        saver.close()


def write(request: Request) -> bool:
    return request.conditional_write


def anything(request: Request) -> bool:
    return True


def read(request: Request) -> bool:
    return request.method in ("GET", "HEAD")


def sometimes(share: float, seed: int, when: Callable[[Request], bool]) -> Callable[[Request], bool]:
    """Of the requests meant, a share at random."""
    dice = random.Random(seed)
    return lambda request: when(request) and dice.random() < share


def assert_whole(saver: LSMSaver, thread_id: str, configs: list, count: int) -> None:
    """The chain that `work` has stored is there, each checkpoint and write of it once."""
    found = list(saver.list(at(thread_id)))
    assert [kept.checkpoint["id"] for kept in found] == ids(configs)[::-1]
    assert len(found) == count
    for number, kept in enumerate(reversed(found)):
        assert kept.checkpoint["channel_values"] == {"count": number, "text": f"text {number} " * 40}
        assert kept.metadata == {"source": "loop", "step": number}
        assert kept.pending_writes == [("task", "count", number), ("task", "text", "w")]
        parent = kept.parent_config["configurable"]["checkpoint_id"] if kept.parent_config else None
        assert parent == (ids(configs)[number - 1] if number else None)


def work(saver: LSMSaver, thread_id: str, count: int) -> list:
    """A chain of checkpoints, each with writes."""
    configs: list = []
    for number in range(count):
        parent = configs[-1] if configs else at(thread_id)
        values = {"count": number, "text": f"text {number} " * 40}
        configs.append(put(saver, parent, values, step=number))
        saver.put_writes(configs[-1], [("count", number), ("text", "w")], "task")
    return configs


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_every_third_write_fails_once(proxy: S3Proxy, connect: Callable[[], LSMSaver], fault: Fault | Answer) -> None:
    rule = Rule(fault, when=write, every=3)
    proxy.rules.append(rule)
    configs = work(connect(), "thread", 9)
    assert rule.applied >= 6
    proxy.rules.clear()
    assert_whole(connect(), "thread", configs, 9)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_first_write_of_a_thread_fails(
    proxy: S3Proxy, connect: Callable[[], LSMSaver], fault: Fault | Answer
) -> None:
    # Create-only: after a lost answer the object is there, and it is our own.
    saver = connect()
    saver.setup()
    rule = Rule(fault, when=lambda request: write(request) and "/manifests/" in request.key, times=2)
    proxy.rules.append(rule)
    configs = work(saver, "thread", 1)
    assert rule.applied == 2
    assert_whole(connect(), "thread", configs, 1)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_first_write_to_a_store_fails(
    proxy: S3Proxy, connect: Callable[[], LSMSaver], fault: Fault | Answer
) -> None:
    # The proof that the store enforces conditions meets a fault itself.
    rule = Rule(fault, when=write, times=1)
    proxy.rules.append(rule)
    configs = work(connect(), "thread", 2)
    assert rule.applied == 1
    assert_whole(connect(), "thread", configs, 2)


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_ANSWER, SLOW_DOWN, INTERNAL_ERROR], ids=name_of)
def test_every_second_read_fails_once(proxy: S3Proxy, connect: Callable[[], LSMSaver], fault: Fault | Answer) -> None:
    configs = work(connect(), "thread", 5)
    rule = Rule(fault, when=read, every=2)
    proxy.rules.append(rule)
    saver = connect()
    assert_whole(saver, "thread", configs, 5)
    for number, config in enumerate(configs):
        assert saver.get_tuple(config).checkpoint["channel_values"]["count"] == number
    assert rule.applied >= 1


@pytest.mark.parametrize("seed", [1, 2])
def test_anything_fails_at_random_while_threads_write_side_by_side(
    proxy: S3Proxy, connect: Callable[[], LSMSaver], seed: int
) -> None:
    # Two savers on one thread id, several callers each: conflicts that are real among failures that are not.
    savers = [connect(), connect()]
    for number, fault in enumerate(FAULTS):
        meant = write if fault is CONFLICT else anything  # S3 gives this one to conditional writes only
        proxy.rules.append(Rule(fault, when=sometimes(0.05, seed * 100 + number, meant)))

    def branch(number: int) -> list[str]:
        saver = savers[number % 2]
        configs = chain(saver, "shared", [{"count": [number, step]} for step in range(8)])
        for config in configs:
            saver.put_writes(config, [("count", number)], f"task-{number}")
        return ids(configs)

    with ThreadPoolExecutor(4) as pool:
        branches = list(pool.map(branch, range(4)))
    assert sum(rule.applied for rule in proxy.rules) >= 5
    proxy.rules.clear()

    reader = connect()
    assert listed(reader, at("shared")) == sorted((one for branch in branches for one in branch), reverse=True)
    for number, branch_ids in enumerate(branches):
        for step, checkpoint_id in enumerate(branch_ids):
            kept = reader.get_tuple(at("shared", checkpoint_id))
            assert kept.checkpoint["channel_values"] == {"count": [number, step]}
            assert kept.pending_writes == [(f"task-{number}", "count", number)]


@pytest.mark.parametrize("fault", [Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, SLOW_DOWN], ids=name_of)
def test_segments_and_deletions_survive_failures(
    proxy: S3Proxy, connect: Callable[[], LSMSaver], fault: Fault | Answer
) -> None:
    saver = connect()
    saver.setup()
    rule = Rule(fault, every=3)
    proxy.rules.append(rule)
    kept = work(saver, "kept", 6)
    work(saver, "gone", 3)
    saver.flush("kept")
    saver.copy_thread("kept", "copy")
    saver.compact("kept")
    saver.delete_thread("gone")
    saver.prune(["copy"])
    assert rule.applied >= 5
    proxy.rules.clear()
    reader = connect()
    assert_whole(reader, "kept", kept, 6)
    assert listed(reader, at("copy")) == ids(kept)[-1:]
    assert reader.get_tuple(at("gone")) is None


def test_a_lost_answer_is_not_taken_for_a_conflict(proxy: S3Proxy, connect: Callable[[], LSMSaver]) -> None:
    # Asserted where it can be seen: the manifest in the bucket does not grow by a second copy of the commit.
    saver = connect()
    configs = work(saver, "thread", 3)
    proxy.clear()
    proxy.rules.append(Rule(Fault.LOSE_ANSWER, when=write, times=1))
    saver.put_writes(configs[-1], [("late", 1)], "late-task")
    written = [request for request in proxy.requests if write(request)]
    assert [request.status for request in written] in ([0, 412], [0]), "the client's own retry, and nothing after it"
    assert connect().get_tuple(at("thread")).pending_writes[0] == ("late-task", "late", 1)
