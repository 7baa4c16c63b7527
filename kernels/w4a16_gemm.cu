// out[M, N] = x[M, K] @ (s * q)[N, K]^T  (+ bias) (+ addend)    for int4 weights q and 1 <= M <= 32 tokens per launch.
//
// Contract, layout and limits: kernels/README.md. How it works, in the order of the code:
//
// * Weights are the A operand of mma.m16n8k16 (16 output columns), and tokens are B (8 tokens). One to eight tokens
//   cost one mma per 16x16 block, and sixteen cost two.
// * q = u - 8 is exact in the activation's 16-bit type, up to one power of two for all (Bf16, Fp16 below). A group is
//   summed in float32, and only that sum is multiplied by the scale. No weight is ever rounded.
// * Two neighbouring strips of 16 columns make a *pair*; a warp multiplies both with the same x fragment. Two tiles
//   of 64 rows make a *stage*: 2 KB of weights. A block owns `pairs` x `stages` of a K slice, as one list with K
//   running fastest, cut into equal runs, one per warp. Every warp streams its own run through its own ring in
//   shared memory: there is no block barrier in the main loop, and warps x (kStages - 1) x 2 KB are in flight.
// * x of the slice lies in shared memory for the whole launch.
// * A pair that several warps share is summed over the warps, and a pair that several slices share over the slices.
//   The order is always that of ascending K, so the result does not depend on which warp or block finishes first.
//
// Compile-time choices (macros at the bottom): activation type with even levels or a table, scale type, token tiles kMt in {1,2,4} of 8 tokens, where groups
// end (kFold: 0 = every 32 rows, 1 = every 64, 3 = every 128, 2 = at multiples of 64 << group_shift), ring depth kStages.

#include "primitives.cuh"
#include "levels.cuh"
#include "w4a16.cuh"

namespace loopq {

constexpr int kStageTiles = 2;    // tiles of one strip per stage
constexpr int kScaleRowBytes = kPairColumns * 4;

// One warp's share of a block and the block's share of the problem; all of it uniform across the warp.
struct Share {
    int pair0, pairs;        // the block's pairs
    int tile0, tiles;        // the block's K slice; it begins at an even tile, so that groups end where stages do
    int stages;              // per pair
    bool half_last;          // the last stage of a pair has one tile
    int warps, warp, lane;
    int begin, end;          // the warp's run in the block's list of pairs * stages stages
};

// 32-bit throughout: a block has at most (n / 32) * (k / 128) * 16 < 2^31 for any weight that fits a GPU.
LQ_DEVICE int run_start(const Share& s, int warp) { return s.pairs * s.stages * warp / s.warps; }

// The warp that runs a stage: the inverse of run_start.
LQ_DEVICE int run_owner(const Share& s, int stage) {
    return ((stage + 1) * s.warps - 1) / (s.pairs * s.stages);
}

LQ_DEVICE Share make_share(const Arguments& p) {
    Share s;
    const int all_pairs = (p.n / 16 + 1) / 2;
    const int first_tile = p.k_begin / kTileRows / kStageTiles * kStageTiles;
    const int end_tile = (p.k_end + kTileRows - 1) / kTileRows;
    const int all_stages = (end_tile - first_tile + kStageTiles - 1) / kStageTiles;
    const int stage0 = all_stages * block_y() / grid_y();
    s.stages = all_stages * (block_y() + 1) / grid_y() - stage0;
    s.pair0 = all_pairs * block_x() / grid_x();
    s.pairs = all_pairs * (block_x() + 1) / grid_x() - s.pair0;
    s.tile0 = first_tile + stage0 * kStageTiles;
    s.tiles = smaller(s.stages * kStageTiles, end_tile - s.tile0);
    s.half_last = s.tiles % kStageTiles != 0;
    s.warps = thread_count() / 32;
    s.warp = thread_index() / 32;
    s.lane = thread_index() % 32;
    s.begin = run_start(s, s.warp);
    s.end = run_start(s, s.warp + 1);
    return s;
}

// The next stage to fetch. The pointers are this lane's own sources, where the slice begins in the pair's strips and in the
// pair's columns of row 0 of the scales.
struct Cursor {
    int flat, in_pair, pair;
    const char* weights;
    const char* other_weights;
    const char* scales;
};

template <class Act, class Scale, int kMt, int kFold, int kStages>
struct Gemm {
    static constexpr int kScaleRows = kFold == 0 ? 2 * kStageTiles : kFold == 1 ? kStageTiles : 1;
    static constexpr int kStageBytes = 2 * kStageTiles * kTileBytes + kScaleRows * kScaleRowBytes;
    static constexpr int kRingBytes = kStages * kStageBytes;
    typedef PairOfStrips<Act, Scale, kMt> Pair;
    typedef typename Pair::Sums Sums;
    static constexpr int kFragmentBytes = Pair::kFragmentBytes;
    static_assert(kRingBytes >= kFragmentBytes, "a drained ring must hold one pair's sums");

    const Arguments& p;
    Share s;
    Pair own;  // what this warp does with a pair
    u32 x_address, x_pitch, head_slots, rings, scale_pitch;
    u64 policy;

    // ---- shared memory: x | one slot of sums per warp | one ring per warp ---------------------------------------

    LQ_DEVICE_METHOD Gemm(const Arguments& arguments)
        : p(arguments), s(make_share(arguments)), own{arguments, s.lane, (arguments.n / 16 + 1) / 2, 0, 0} {
        x_address = shared_base();
        // 16 bytes beyond a multiple of 128 put eight rows of a column on different banks.
        x_pitch = (u32)s.tiles * (kTileRows * 2) + 16;
        head_slots = x_address + x_pitch * (u32)p.m;
        rings = head_slots + (u32)(s.warps * kFragmentBytes);
        scale_pitch = (u32)p.n << Scale::kShift;
        policy = l2_policy((p.flags & kEvictFirst) != 0);
    }

    LQ_DEVICE_METHOD u32 ring(int warp) const { return rings + (u32)(warp * kRingBytes); }
    LQ_DEVICE_METHOD u32 head_slot(int warp) const { return head_slots + (u32)(warp * kFragmentBytes); }

    // ---- weights and scales on their way in -------------------------------------------------------------------------
    //
    // A stage in the ring: strip, tiles 0 and 1 | other strip, tiles 0 and 1 | scale rows of 32 columns. Sixteen-byte
    // pieces of scale rows are spread over the lanes: kPieces per row, the first half of them from the first strip.

    static constexpr int kPieces = 2 << Scale::kShift;
    static constexpr u32 kOther = kStageTiles * kTileBytes;
    static constexpr u32 kScales = 2 * kStageTiles * kTileBytes;

    // Whether the group, or the warp's part of the pair, ends with this stage (kFold 2 only).
    LQ_DEVICE_METHOD bool folds_after(int flat, int in_pair) const {
        const int next = s.tile0 + (in_pair + 1) * kStageTiles;
        return (next & ((1 << p.group_shift) - 1)) == 0 || in_pair == s.stages - 1 || flat == s.end - 1;
    }

    LQ_DEVICE_METHOD void place(Cursor& c) const {
        const int strip = 2 * c.pair;
        // An odd number of strips leaves the last pair half empty; its second half repeats the first and is not stored.
        const int other = smaller(strip + 1, p.n / 16 - 1);
        const int lane_offset = s.lane * 16;
        c.weights = (const char*)p.weights + ((long long)strip * p.k_tiles + s.tile0) * kTileBytes + lane_offset;
        c.other_weights = (const char*)p.weights + ((long long)other * p.k_tiles + s.tile0) * kTileBytes + lane_offset;
        const int piece = s.lane % kPieces;
        c.scales = (const char*)p.scales + ((long long)((piece < kPieces / 2 ? strip : other) * 16) << Scale::kShift)
                   + (piece % (kPieces / 2)) * 16;
    }

    // Where row `row` of a stage's scales comes from; the last row of all where K ends early.
    LQ_DEVICE_METHOD const char* scale_source(const Cursor& c, int row) const {
        const int stage = s.tile0 / kStageTiles + c.in_pair;
        const int index = kFold == 2 ? stage * kStageTiles >> p.group_shift : stage * kScaleRows + row;
        return c.scales + (u64)(u32)smaller(index, p.scale_rows - 1) * scale_pitch;
    }

    LQ_DEVICE_METHOD void fetch_next(Cursor& c, int slot) const {
        const u32 to = ring(s.warp) + (u32)(slot * kStageBytes);
        const bool whole = !(s.half_last && c.in_pair == s.stages - 1);
        const bool with_scales = kFold != 2 || folds_after(c.flat, c.in_pair);  // kFold 3: one row, every stage
        const u64 offset = (u64)(u32)c.in_pair * (kStageTiles * kTileBytes);
        fetch_lanes(c, to, offset, whole, with_scales);
        ++c.flat;
        if (++c.in_pair == s.stages) {
            c.in_pair = 0;
            ++c.pair;
            if (c.flat < s.end) place(c);
        }
    }

    LQ_DEVICE_METHOD void fetch_lanes(const Cursor& c, u32 to, u64 offset, bool whole, bool with_scales) const {
        const u32 mine = to + (u32)s.lane * 16;
        const char* from = c.weights + offset;
        const char* other = c.other_weights + offset;
        copy_async16(mine, from, policy);
        copy_async16(mine + kOther, other, policy);
        if (whole) {
            copy_async16(mine + kTileBytes, from + kTileBytes, policy);
            copy_async16(mine + kOther + kTileBytes, other + kTileBytes, policy);
        }
        const int row = s.lane / kPieces;
        if (with_scales && row < kScaleRows) {
            copy_async16(to + kScales + (u32)(row * kScaleRowBytes + s.lane % kPieces * 16), scale_source(c, row), policy);
        }
    }

    // ---- activations ------------------------------------------------------------------------------------------------

    // A 16-byte piece of x in shared memory: its row, and its place in the row.
    struct Piece {
        int row, column;
    };

    // Moves on by one piece per thread of the block. Kept as two numbers because a division per piece costs more
    // issue slots than all the rest of the copy.
    LQ_DEVICE_MEMBER void advance(Piece& at, Piece step, int pieces) {
        at.row += step.row;
        at.column += step.column;
        if (at.column >= pieces) {
            at.column -= pieces;
            ++at.row;
        }
    }

    // Copies x of the slice, with zeros outside [k_begin, k_end): weights there are padding or belong to another range.
    LQ_DEVICE_METHOD void stage_activations() const {
        const int pieces = s.tiles * (kTileRows / 8);
        const int first_k = s.tile0 * kTileRows;
        const Piece step = {thread_count() / pieces, thread_count() % pieces};
        Piece next = {thread_index() / pieces, thread_index() % pieces};
        constexpr int kBatch = 8;  // loads in flight per thread
        while (next.row < p.m) {
            Vec4 v[kBatch];
            Piece to = next;
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int k = first_k + next.column * 8;
                v[j] = Vec4{0, 0, 0, 0};
                if (next.row < p.m && k >= p.k_begin && k < p.k_end) {
                    v[j] = ld_global4((const u16*)p.x + (long long)next.row * p.x_stride + (k - p.k_begin));
                }
                advance(next, step, pieces);
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                if (to.row < p.m) st_shared4(x_address + (u32)to.row * x_pitch + (u32)to.column * 16, v[j]);
                advance(to, step, pieces);
            }
        }
    }

    // ---- products ---------------------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void fold_row(u32 stage, int row, Sums& part, Sums& sums) const {
        own.template fold<kFold == 2>(own.scales_at(stage + kScales + (u32)(row * kScaleRowBytes)), part, sums);
    }

    LQ_DEVICE_METHOD void consume(int flat, int in_pair, int slot, const u32 (&x_rows)[kMt], Sums& part, Sums& sums) const {
        const u32 stage = ring(s.warp) + (u32)(slot * kStageBytes);
        const bool whole = !(s.half_last && in_pair == s.stages - 1);
#pragma unroll
        for (int t = 0; t < kStageTiles; ++t) {
            if (t == 0 || whole) {
                u32 words[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Vec4 v = ld_shared4(stage + (u32)(i * kOther + t * kTileBytes + s.lane * 16));
                    words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
                }
                const u32 x_tile = x_address + (u32)((in_pair * kStageTiles + t) * kTileRows * 2);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool fresh = kFold == 0 || (kFold == 1 && half == 0) || (kFold == 3 && t == 0 && half == 0);
                    typename Pair::Operands a;
                    own.unpack_half_tile(words, half, a);
#pragma unroll
                    for (int m = 0; m < kMt; ++m) own.multiply(a, m, fresh, x_tile + x_rows[m] + (u32)(half * 64), part);
                    if (kFold == 0) fold_row(stage, 2 * t + half, part, sums);
                }
                if (kFold == 1) fold_row(stage, t, part, sums);
            }
        }
        if (kFold == 3 || (kFold == 2 && folds_after(flat, in_pair))) fold_row(stage, 0, part, sums);
    }

    // ---- sums on their way out --------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void put_slot(u32 address, const Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < kMt; ++t) st_shared4(address + (u32)(((i * kMt + t) * 32 + s.lane) * 16), Pair::pack(sums[i][t]));
    }

    LQ_DEVICE_METHOD void add_slot(u32 address, Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < kMt; ++t) Pair::add(ld_shared4(address + (u32)(((i * kMt + t) * 32 + s.lane) * 16)), sums[i][t]);
    }

    // ---- the launch -------------------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void run() {
        Cursor next = {s.begin, s.begin % s.stages, s.pair0 + s.begin / s.stages, nullptr, nullptr, nullptr};
        place(next);
        // Weights never depend on an earlier kernel: fill the ring before waiting for x.
        for (int slot = 0; slot < kStages - 1; ++slot) {
            if (next.flat < s.end) fetch_next(next, slot);
            copy_async_commit();
        }
        wait_for_previous_kernel();
        stage_activations();
        block_sync();
        stream(next);
        block_sync();
        let_next_kernel_start();
        join_warps();
        if (grid_y() > 1) join_slices();
    }

    LQ_DEVICE_METHOD void stream(Cursor& next) const {
        u32 x_rows[kMt];
#pragma unroll
        for (int t = 0; t < kMt; ++t) {
            // Tokens beyond M repeat the last one, so they add no infinity or NaN, and their results are
            // never stored.
            x_rows[t] = (u32)smaller(t * 8 + s.lane % 8, p.m - 1) * x_pitch + (u32)(s.lane / 8) * 16;
        }
        Sums part;
        own.clear(part);
        int flat = s.begin;
        int in_pair = s.begin % s.stages;
        int pair = s.pair0 + s.begin / s.stages;
        int slot = 0;
        while (flat < s.end) {
            const int from = in_pair;
            const int to = smaller(s.stages, in_pair + s.end - flat);
            Sums sums;
            own.clear(sums);
            for (; in_pair < to; ++in_pair, ++flat) {
                copy_async_wait<kStages - 2>();
                // Every lane sees the stage's scales and has finished the stage before, so that stage's slot
                // is refilled now.
                warp_sync();
                if (next.flat < s.end) fetch_next(next, slot == 0 ? kStages - 1 : slot - 1);
                copy_async_commit();
                consume(flat, in_pair, slot, x_rows, part, sums);
                if (++slot == kStages) slot = 0;
            }
            own.to_units(sums);
            end_segment(pair, from, to, sums);
            in_pair = 0;
            ++pair;
        }
    }

    // Stages [from, to) of a pair are summed. Whole pairs leave. The first part of a pair stays in the warp's own ring,
    // which is drained by then, since nothing follows it in the run. Any other part goes to the warp's head slot.
    LQ_DEVICE_METHOD void end_segment(int pair, int from, int to, const Sums& sums) const {
        if (from == 0 && to == s.stages) {
            own.finish_slice(pair, sums);
        } else if (from == 0) {
            warp_sync();
            put_slot(ring(s.warp), sums);
        } else {
            put_slot(head_slot(s.warp), sums);
        }
    }

    LQ_DEVICE_METHOD void join_warps() const {
        for (int i = s.warp; i < s.pairs; i += s.warps) {
            const int first = run_owner(s, i * s.stages);
            const int last = run_owner(s, (i + 1) * s.stages - 1);
            if (first == last) continue;
            Sums sums;
            own.clear(sums);
            add_slot(ring(first), sums);
            for (int warp = first + 1; warp <= last; ++warp) {
                if (run_start(s, warp) < run_start(s, warp + 1)) add_slot(head_slot(warp), sums);
            }
            own.finish_slice(s.pair0 + i, sums);
        }
    }

    // The block that brings a pair's last slice adds all slices of that pair, in order, and leaves the counter at zero.
    LQ_DEVICE_METHOD void join_slices() const {
        block_sync();
        fence_gpu();  // in the thread that counts, and behind the barrier: so it covers what the whole block wrote
        for (int base = s.warp; base < s.pairs; base += 32 * s.warps) {
            const int mine = base + s.lane * s.warps;
            u32 last = 0;
            if (mine < s.pairs) {
                u32* counter = (u32*)p.counters + s.pair0 + mine;
                last = atomic_add(counter, 1) == (u32)grid_y() - 1 ? 1u : 0u;
                if (last) st_global1(counter, 0);
            }
            fence_gpu();  // and before the barrier, for the lanes that did not count
            warp_sync();
            for (int j = 0; j < 32 && base + j * s.warps < s.pairs; ++j) {
                if (shuffle_from(last, j) == 0) continue;
                own.join_slices_of(s.pair0 + base + j * s.warps);
            }
        }
    }
};

}  // namespace loopq

// One entry per compilation; the host emulation instantiates the template itself.
#ifdef LQ_ACT
LQ_KERNEL void __launch_bounds__(LQ_THREADS, 1) loopq_w4a16_gemm(
    const void* x, const void* weights, const void* scales, void* out, const void* bias, const void* addend,
    void* partials, void* counters, int m, int n, int k_tiles, int k_begin, int k_end,
    int x_stride, int out_stride, int addend_stride, int group_shift, int scale_rows, int flags,
    int levels0, int levels4, int levels8, int levels12) {
    const loopq::Arguments arguments = {x, weights, scales, out, bias, addend, partials, counters,
                                        m, n, k_tiles, k_begin, k_end,
                                        x_stride, out_stride, addend_stride, group_shift, scale_rows, flags,
                                        {(u32)levels0, (u32)levels4, (u32)levels8, (u32)levels12}};
    loopq::Gemm<loopq::LQ_ACT, loopq::LQ_SCALE, LQ_MT, LQ_FOLD, LQ_STAGES> gemm(arguments);
    gemm.run();
}
#endif
