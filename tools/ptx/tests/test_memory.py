"""The PTX interpreter's memory: what it must accept, and what it must refuse, by hand-written programs."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptx.parse import PtxError
from tools.ptx.tests.snippets import execute, lanes, load, store

LANE = np.arange(32)
WARP_BARRIER = "bar.warp.sync 0xffffffff;"
NEIGHBOUR = (
    "xor.b32 %r9, %r60, {distance}; shl.b32 %r9, %r9, 4; add.s32 %r9, %r9, %r63; ld.shared.u32 %r1, [%r9];"
)


def refused(body: str, message: str, **options: object) -> None:
    """Some order of warps and blocks must show the defect."""
    complaints = []
    for seed in range(12):
        try:
            execute(body, seed=seed, **options)  # type: ignore[arg-type]
        except PtxError as error:
            complaints.append(str(error))
    assert any(message in c for c in complaints), complaints


# ---- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r1, [%d3+1024];", "outside memory"),
        ("ld.global.u32 %r1, [%d1+-4];", "outside memory"),
        ("ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d3+8];", "not aligned to 16"),
        ("ld.global.u16 %h1, [%d3+1];", "not aligned to 2"),
        ("st.global.u32 [%d3], %r60;", "write to in, which is only read"),
        ("st.global.u32 [%d2], %r60;", "two lanes write one element"),
        ("ld.shared.u32 %r1, [%r63];", "that is unwritten"),
        ("st.shared.u32 [%r59+4096], %r60;", "shared access at byte 4096 of 4096"),
        ("st.shared.u32 [%r59+2], %r60;", "not aligned to 4"),
        ("st.shared.u32 [0], %r60;", "shared access at byte -1024"),
        ("st.shared.u32 [%r63], %r60;", "two lanes write one shared word"),
    ],
)
def test_wrong_addresses(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        execute(body)


def test_loads_and_stores_of_every_size() -> None:
    body = "ld.global.v2.u64 {%d6, %d7}, [%d3]; ld.global.u16 %h1, [%d3+18]; cvt.u32.u16 %r1, %h1;"
    body += "st.shared.v4.u32 [%r59], {%r60, %r1, %r60, %r1}; ld.shared.u16 %h2, [%r59+6];"
    body += "ld.shared.v2.u32 {%r2, %r3}, [%r59]; cvt.u32.u16 %r4, %h2;"
    body += "st.global.v2.u64 [%d4], {%d7, %d6}; st.global.u16 [%d4+16], %h1; st.global.v2.u32 [%d4+24], {%r2, %r4};"
    words = np.random.default_rng(0).integers(0, 1 << 32, (32, 8), dtype=np.uint32)
    out = execute(body, words)
    np.testing.assert_array_equal(out[:, :4], words[:, [2, 3, 0, 1]])
    np.testing.assert_array_equal(out[:, 4], words[:, 4] >> 16 | 0xEEEE0000)
    np.testing.assert_array_equal(out[:, 6], LANE)
    np.testing.assert_array_equal(out[:, 7], 0)  # the high half of a 16-bit number


# ---- order within a block ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "barrier", "fails"),
    [
        (0, "", False),  # its own word
        (1, "", True),
        (1, WARP_BARRIER, False),
        (1, "bar.sync 0;", False),
        (32, WARP_BARRIER, True),  # a thread of the other warp
        (32, "bar.sync 0;", False),
    ],
)
def test_reads_of_what_another_thread_wrote(distance: int, barrier: str, fails: bool) -> None:
    body = f"st.shared.u32 [%r59], %r60; {barrier} {NEIGHBOUR.format(distance=distance)}" + store("%r1")
    if fails:
        # Which of the two it is depends on the order of the warps.
        refused(
            body, "that is unwritten" if distance == 32 else "writes, with no barrier between", threads=64
        )
    else:
        for seed in range(8):
            out = execute(body, threads=64, seed=seed)
            np.testing.assert_array_equal(out[:, 0], np.arange(64) ^ distance)


@pytest.mark.parametrize(
    ("distance", "barrier", "fails"),
    [
        (0, "", False),
        (1, "", True),
        (1, WARP_BARRIER, False),
        (32, WARP_BARRIER, True),
        (32, "bar.sync 0;", False),
    ],
)
def test_writes_to_what_another_thread_reads(distance: int, barrier: str, fails: bool) -> None:
    """All write; after a block barrier all read a neighbour's word; then all write again."""
    body = f"st.shared.u32 [%r59], %r60; bar.sync 0; {NEIGHBOUR.format(distance=distance)} {barrier}"
    body += "st.shared.u32 [%r59], %r1;"
    if fails:
        # Between warps the other one's write is found by the read.
        refused(body, f"{'reads' if distance == 1 else 'writes'}, with no barrier between", threads=64)
    else:
        execute(body, threads=64)


def test_a_word_that_all_lanes_read() -> None:
    """Several readers of one word count, not the last of them only."""
    body = "setp.eq.s32 %p1, %r60, 0; @%p1 st.shared.u32 [%r63], %r60; bar.warp.sync 0xffffffff;"
    body += "ld.shared.u32 %r1, [%r63]; setp.eq.s32 %p2, %r60, 31; @%p2 st.shared.u32 [%r63], %r60;"
    refused(body, "that another thread reads, with no barrier between")
    execute(body.replace("setp.eq.s32 %p2", WARP_BARRIER + "setp.eq.s32 %p2"))


def test_a_barrier_that_not_all_reach() -> None:
    body = "setp.ge.s32 %p1, %r60, 32; @%p1 ret; bar.sync 0;"
    with pytest.raises(PtxError, match="deadlock"):
        execute(body, threads=64)


# ---- cp.async ---------------------------------------------------------------------------------------------------

COPY = "cp.async.cg.shared.global [{to}], [%d3{offset}], 16;"
FIRST = COPY.format(to="%r59", offset="") + "cp.async.commit_group;"
SECOND = COPY.format(to="%r59+2048", offset="+16") + "cp.async.commit_group;"
WORDS = np.arange(256, dtype=np.uint32).reshape(32, 8)


def test_copies_land_at_the_wait_for_their_group() -> None:
    body = FIRST + SECOND + "cp.async.wait_group 1; ld.shared.u32 %r1, [%r59+4];"
    np.testing.assert_array_equal(execute(body + store("%r1"), WORDS)[:, 0], WORDS[:, 1])
    body += "cp.async.wait_group 0; ld.shared.u32 %r2, [%r59+2060];"
    np.testing.assert_array_equal(execute(body + store("%r2"), WORDS)[:, 0], WORDS[:, 7])
    every = FIRST + COPY.format(to="%r59+2048", offset="+16") + "cp.async.wait_all;"
    execute(every + "ld.shared.u32 %r1, [%r59+4]; ld.shared.u32 %r2, [%r59+2060];", WORDS)


@pytest.mark.parametrize(
    "body",
    [
        FIRST + "ld.shared.u32 %r1, [%r59];",
        FIRST + SECOND + "cp.async.wait_group 2; ld.shared.u32 %r1, [%r59];",
        FIRST + SECOND + "cp.async.wait_group 1; ld.shared.u32 %r1, [%r59+2048];",
        FIRST + "st.shared.u32 [%r59], %r60;",
        # In no group yet: wait_group 0 does not wait for it.
        COPY.format(to="%r59", offset="") + "cp.async.wait_group 0; ld.shared.u32 %r1, [%r59];",
    ],
)
def test_copies_under_way_are_not_touched(body: str) -> None:
    with pytest.raises(PtxError, match=r"in flight \(cp.async\)"):
        execute(body, WORDS)


def test_each_thread_waits_for_its_own_copies_only() -> None:
    read = "cp.async.wait_group 0; {barrier}" + NEIGHBOUR.format(distance=1)
    refused(FIRST + read.format(barrier=""), "that another thread writes, with no barrier between")
    out = execute(FIRST + read.format(barrier=WARP_BARRIER) + store("%r1"), WORDS)
    np.testing.assert_array_equal(out[:, 0], WORDS[LANE ^ 1, 0])


def test_groups_count_per_lane() -> None:
    """Half of the warp commits once more: the same wait covers less for it."""
    body = FIRST + "setp.lt.s32 %p1, %r60, 16; @%p1 cp.async.commit_group; cp.async.wait_group 1;"
    guarded = body + "@%p1 ld.shared.u32 %r1, [%r59];"
    execute(guarded, WORDS)
    with pytest.raises(PtxError, match="in flight"):
        execute(body + "ld.shared.u32 %r1, [%r59];", WORDS)


def test_a_policy_has_to_be_made() -> None:
    hinted = "cp.async.cg.shared.global.L2::cache_hint [%r59], [%d3], 16, %d9;"
    execute("createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;" + hinted, WORDS)
    with pytest.raises(PtxError, match="no cache policy"):
        execute("mov.u64 %d9, 0;" + hinted, WORDS)


# ---- between blocks ---------------------------------------------------------------------------------------------

# Lane 0 of each block writes a word of its own, then counts itself; who is last reads the other block's word.
PUBLISH = "setp.ne.s32 %p1, %r60, 0; @%p1 ret; add.s32 %r1, %r61, 50; st.global.u32 [%d4], %r1;"
COUNT = "atom.global.add.u32 %r2, [%d2+8], 1; setp.eq.u32 %p2, %r2, 0xEEEEEEEE; @%p2 ret;"
COLLECT = "xor.b32 %r3, %r61, 1; mul.wide.u32 %d6, %r3, 1024; add.s64 %d6, %d6, %d2;"
COLLECT += "ld.global.cg.u32 %r4, [%d6]; st.global.u32 [%d4+4], %r4;"
GPU = "fence.acq_rel.gpu;"


def test_blocks_meet_at_a_counter() -> None:
    seen = set()
    for seed in range(12):
        out = execute(PUBLISH + GPU + COUNT + GPU + COLLECT, blocks=2, seed=seed)
        last = int(out[0, 1] == 0xEEEEEEEE)
        assert out[32 * last, 1] == 50 + (1 - last)
        assert out[0, 2] == 0xEEEEEEF0
        seen.add(last)
    assert seen == {0, 1}, "both orders of the blocks must occur"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PUBLISH + COUNT + GPU + COLLECT, "no fence between that and an atomic"),
        (PUBLISH + GPU + COUNT + COLLECT, "no fence between an atomic and here"),
        (PUBLISH + GPU + GPU + COLLECT, "with no fence between that and an atomic"),
        (
            PUBLISH + GPU + COUNT + GPU + COLLECT.replace("ld.global.cg", "ld.global"),
            "L1 may hold what was before",
        ),
        (PUBLISH + "st.global.u32 [%d2+16], %r60;", "two blocks write one element"),
    ],
)
def test_what_blocks_must_not_do(body: str, message: str) -> None:
    refused(body, message, blocks=2)


def test_one_lane_counts_for_its_warp_behind_barriers_only() -> None:
    """Lane 0 fences and counts for all lanes: what they wrote, and what they read then, lies beyond a barrier each."""
    body = "add.s32 %r1, %r61, 50; st.global.u32 [%d4], %r1; {before}" + GPU + "setp.eq.s32 %p1, %r60, 0;"
    body += "mov.u32 %r2, 0; @%p1 atom.global.add.u32 %r2, [%d2+8], 1;" + GPU + "{behind}"
    body += "shfl.sync.idx.b32 %r2, %r2, 0, 31, 0xffffffff; setp.eq.u32 %p2, %r2, 0xEEEEEEEE; @%p2 ret;"
    body += "xor.b32 %r3, %r62, 32; mul.wide.u32 %d6, %r3, 32; add.s64 %d6, %d6, %d2; ld.global.cg.u32 %r4, [%d6];"
    execute(body.format(before=WARP_BARRIER, behind=WARP_BARRIER), blocks=2)
    refused(body.format(before="", behind=WARP_BARRIER), "no fence between that and an atomic", blocks=2)
    refused(body.format(before=WARP_BARRIER, behind=""), "no fence between an atomic and here", blocks=2)


def test_a_fence_of_another_thread_than_the_one_that_counts_is_none() -> None:
    """Lane 1 fences and lane 0 counts behind a barrier: common, but by the letter of the PTX model no release."""
    body = "add.s32 %r1, %r61, 50; st.global.u32 [%d4], %r1; setp.eq.s32 %p1, %r60, {fences}; @!%p1 bra next;"
    body += GPU + "next: " + WARP_BARRIER + "setp.eq.s32 %p1, %r60, 0; mov.u32 %r2, 0;"
    body += "@%p1 atom.global.add.u32 %r2, [%d2+8], 1;" + GPU + WARP_BARRIER
    body += "shfl.sync.idx.b32 %r2, %r2, 0, 31, 0xffffffff; setp.eq.u32 %p2, %r2, 0xEEEEEEEE; @%p2 ret;"
    body += "setp.ne.s32 %p1, %r60, {fences}; @%p1 ret;"
    body += "xor.b32 %r3, %r62, 32; mul.wide.u32 %d6, %r3, 32; add.s64 %d6, %d6, %d2; ld.global.cg.u32 %r4, [%d6];"
    execute(body.format(fences=0), blocks=2)
    refused(body.format(fences=1), "no fence between that and an atomic", blocks=2)


def test_a_loop_without_end_is_stopped() -> None:
    with pytest.raises(PtxError, match="no end after 5000 basic blocks"):
        execute("again: bra again;", limit=5000)


def test_threads_of_a_block_share_global_memory_over_barriers() -> None:
    body = "st.global.u32 [%d4], %r60; {barrier} xor.b32 %r1, %r60, 1; mul.wide.u32 %d6, %r1, 32;"
    body += "add.s64 %d6, %d6, %d2; ld.global.u32 %r2, [%d6]; st.global.u32 [%d4+4], %r2;"
    refused(body.format(barrier=""), "with no barrier between")
    np.testing.assert_array_equal(execute(body.format(barrier=WARP_BARRIER))[:, 1], LANE ^ 1)


def test_an_earlier_kernel_must_be_waited_for() -> None:
    body = load(1) + "{wait}" + store("%r0")
    with pytest.raises(PtxError, match=r"in is used before griddepcontrol\.wait"):
        execute(body.format(wait="griddepcontrol.wait;"), overlap=True)
    execute("griddepcontrol.wait;" + body.format(wait=""), lanes(1), overlap=True)
