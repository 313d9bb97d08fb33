"""The scheduler's promises, over random arrivals: blocks are never shared or lost, budgets hold, everything finishes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fitment_engine.sampling_params import SamplingParams
from fitment_engine.scheduler import BlockPool, Scheduler
from fitment_engine.sequence import Sequence

BLOCK = 4


def sequence(name: str, num_prompt: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Sequence(name, 0, list(range(1, num_prompt + 1)), num_prompt, params, frozenset())


def compute(scheduled: list[tuple[Sequence, int]]) -> None:
    """Stand in for the model: every scheduled token is computed, and a sequence that caught up gets a new one."""
    for seq, count in scheduled:
        seq.num_computed += count
        if seq.num_pending == 0:
            seq.append(0)
            seq.finish_by_tokens(10_000)


def test_a_pool_gives_all_or_nothing() -> None:
    pool = BlockPool(3, BLOCK)
    seq = sequence("a", 20, 1)
    assert not pool.grow(seq, 13)
    assert (seq.blocks, pool.num_free) == ([], 3)
    assert pool.grow(seq, 12)
    assert sorted(seq.blocks) == [0, 1, 2]
    pool.release(seq)
    assert (seq.blocks, pool.num_free) == ([], 3)


def test_a_long_prompt_leaves_room_for_running_sequences() -> None:
    scheduler = Scheduler(BlockPool(100, BLOCK), 8, 16)
    short, long = sequence("short", 4, 20), sequence("long", 100, 1)
    scheduler.add([short])
    compute(scheduler.schedule())
    scheduler.add([long])
    for _ in range(3):
        step = {seq.request_id: count for seq, count in scheduler.schedule()}
        assert step == {"short": 1, "long": 15}
        compute([(short, 1), (long, 15)])


def test_the_last_to_come_is_preempted_and_comes_back() -> None:
    scheduler = Scheduler(BlockPool(4, BLOCK), 8, 64)
    first, second = sequence("first", 7, 9), sequence("second", 7, 9)
    scheduler.add([first, second])
    order = []
    while scheduler.has_work:
        compute(scheduler.schedule())
        order += [seq.request_id for seq in (first, second) if seq.is_finished and seq.request_id not in order]
        scheduler.remove_finished()
    assert order == ["first", "second"]
    assert (first.num_preempted, second.num_preempted) == (0, 1)
    assert [seq.num_outputs for seq in (first, second)] == [9, 9]


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=12),
    num_blocks=st.integers(13, 40),
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 40),
)
def test_everything_finishes_and_nothing_is_lost(
    requests: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, max_batch_tokens: int
) -> None:
    pool = BlockPool(num_blocks, BLOCK)  # 13 blocks hold the longest sequence, 50 tokens
    scheduler = Scheduler(pool, max_num_seqs, max_batch_tokens)
    arriving = sorted(((when, sequence(str(i), prompt, new)) for i, (prompt, new, when) in enumerate(requests)), key=lambda a: a[0])
    everything = [seq for _, seq in arriving]
    step = 0
    while arriving or scheduler.has_work:
        while arriving and arriving[0][0] <= step:
            scheduler.add([arriving.pop(0)[1]])
        scheduled = scheduler.schedule()
        assert sum(count for _, count in scheduled) <= max(max_batch_tokens, 1)
        assert len(scheduler.running) <= max_num_seqs
        held = [block for seq in everything for block in seq.blocks]
        assert len(held) == len(set(held)) and len(held) + pool.num_free == num_blocks
        for seq, count in scheduled:
            assert 0 < count <= seq.num_pending
            assert len(seq.blocks) * BLOCK >= seq.num_computed + count
        if not arriving and scheduler.has_work:
            assert scheduled, "work is left and nothing is scheduled"
        compute(scheduled)
        scheduler.remove_finished()
        step += 1
        assert step < 5000
    assert pool.num_free == num_blocks
    assert [seq.num_outputs for seq in everything] == [seq.params.max_tokens for seq in everything]
