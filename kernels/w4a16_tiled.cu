// out[M, N] = x[M, K] @ (s * q)[N, K]^T  (+ bias) (+ addend)    for int4 weights q and more tokens than w4a16_gemm.cu takes.
//
// Contract, layout and limits: kernels/README.md. Codes, groups and sums are those of w4a16_gemm.cu (w4a16.cuh). The differences:
//
// * A block owns 64 kTokenWarps tokens and 256 / kTokenWarps outputs of a K slice. Each of its 8 warps owns a pair of strips
//   and 64 tokens, so an unpacked code serves 64 tokens. Up to 128 tokens one block has all of them, and every weight is
//   read once; beyond that the blocks of the same outputs are neighbours in the grid and find each other's weights in the L2.
// * x does not stay: each stage of the block's one ring brings 64 rows of K, weights, scales and x, by 16-byte cp.async of all
//   threads. One block barrier per stage says both that it is there and that the stage before may be overwritten.
// * Each warp ends with the sums of one unit, and slices of K are added by the warp that brings the unit's last one, in
//   ascending K order.
//
// Compile-time choices: activation type with even levels or a table, scale type, kTokenWarps in {1, 2}, where groups end (kFold: 0 = every 32 rows, 1 =
// every 64, 2 = at multiples of 64 << group_shift), ring depth kStages.

#include "primitives.cuh"
#include "levels.cuh"
#include "w4a16.cuh"

namespace loopq {

template <class Act, class Scale, int kTokenWarps, int kFold, int kStages>
struct Tiled {
    static constexpr int kMt = 8;
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kTokens = 8 * kMt * kTokenWarps;
    static constexpr int kPairs = kWarps / kTokenWarps;
    static constexpr int kStrips = 2 * kPairs;
    static constexpr int kScaleRows = kFold == 0 ? 2 : 1;

    // A stage in the ring: x | weights, strip by strip | scale rows. 16 bytes beyond 128 put eight rows of x on different banks.
    static constexpr u32 kXPitch = kTileRows * 2 + 16;
    static constexpr u32 kWeights = kTokens * kXPitch;
    static constexpr u32 kScales = kWeights + kStrips * kTileBytes;
    static constexpr u32 kScaleRowBytes = (u32)(kPairs * kPairColumns) << Scale::kShift;
    static constexpr u32 kStageBytes = kScales + kScaleRows * kScaleRowBytes;

    // Pieces of 16 bytes that one thread brings per stage.
    static constexpr int kXPieces = kTokens * (kTileRows / 8) / kThreads;
    static constexpr int kWeightPieces = kStrips * (kTileBytes / 16) / kThreads;
    static constexpr int kScalePieces = (int)(kScaleRows * kScaleRowBytes / 16);
    static_assert(kScalePieces <= kThreads, "one piece of scales per thread at most");

    typedef PairOfStrips<Act, Scale, kMt> Pair;
    typedef typename Pair::Sums Sums;

    // The work of a thread: the block's strips and tokens, and the warp's pair and first token within them.
    struct Place {
        int thread, lane, strip0, token0, pair, token;
    };

    LQ_DEVICE_METHOD Place place_of(int thread, int block) const {
        const int warp = thread / 32;
        const int token_blocks = (p.m + kTokens - 1) / kTokens;
        return {thread, thread % 32, block / token_blocks * kStrips, block % token_blocks * kTokens,
                warp / kTokenWarps, warp % kTokenWarps * 8 * kMt};
    }

    const Arguments& p;
    Place me;
    int begin, end;        // tiles of the K slice
    u32 ring, scale_pitch;
    u32 weights[kWeightPieces];  // where this thread's pieces of tile 0 begin, in units of 16 bytes: half a pointer

    LQ_DEVICE_METHOD Tiled(const Arguments& arguments) : p(arguments) {
        me = place_of(thread_index(), block_x());
        const int first_tile = p.k_begin / kTileRows;
        const int tiles = (p.k_end + kTileRows - 1) / kTileRows - first_tile;
        begin = first_tile + tiles * block_y() / grid_y();
        end = first_tile + tiles * (block_y() + 1) / grid_y();
        ring = shared_base();
        scale_pitch = (u32)p.n << Scale::kShift;
#pragma unroll
        for (int j = 0; j < kWeightPieces; ++j) {
            const int piece = me.thread + j * kThreads;
            weights[j] = (u32)(strip_of(piece / 32) * p.k_tiles * (kTileBytes / 16) + piece % 32);
        }
    }

    // Strips and tokens beyond the last repeat it and are not stored.
    LQ_DEVICE_METHOD int strip_of(int in_block) const { return smaller(me.strip0 + in_block, p.n / 16 - 1); }
    LQ_DEVICE_METHOD int token_of(int row) const { return smaller(me.token0 + row, p.m - 1); }

    LQ_DEVICE_METHOD u32 stage(int slot) const { return ring + (u32)slot * kStageBytes; }

    // ---- a stage on its way in --------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void fetch_weights(int tile, int slot) const {
        const u32 to = stage(slot);
        const u64 policy = l2_policy((p.flags & kEvictFirst) != 0);
#pragma unroll
        for (int j = 0; j < kWeightPieces; ++j) {
            const u32 piece = (u32)(me.thread + j * kThreads);
            const u32 from = weights[j] + (u32)(tile * (kTileBytes / 16));
            copy_async16(to + kWeights + piece * 16, (const Vec4*)p.weights + from, policy);
        }
        constexpr int in_row = (int)kScaleRowBytes / 16;
        if (me.thread < kScalePieces) {
            const int row = me.thread / in_row;
            const int column = (me.thread % in_row * 16) >> Scale::kShift;
            const int group = kFold == 2 ? tile >> p.group_shift : tile * kScaleRows + row;
            const char* from = (const char*)p.scales + (u64)(u32)smaller(group, p.scale_rows - 1) * scale_pitch
                               + ((u32)(strip_of(column / 16) * 16 + column % 16) << Scale::kShift);
            copy_async16(to + kScales + (u32)me.thread * 16, from, policy);
        }
    }

    // Zeros outside [k_begin, k_end): weights there are padding or belong to another range.
    LQ_DEVICE_METHOD void fetch_x(int tile, int slot) const {
        // Worked out at each stage: there are no registers to keep it in.
        const u32 thread = (u32)thread_index_anew();
        const int column = (int)(thread % 8);
        const int k = tile * kTileRows + column * 8;
        const u32 to = stage(slot) + (u32)column * 16;
        // One branch around all pieces. Predicated one by one, NVRTC 13.0 to 13.3 gives the copies of some variants a descriptor in an
        // odd uniform register, which is an illegal instruction (tests/runtime/cuda/test_nvrtc.py looks for those).
        if (k >= p.k_begin && k < p.k_end) {
            const u32 from = (u32)((k - p.k_begin) / 8);
#pragma unroll
            for (int j = 0; j < kXPieces; ++j) {
                const int row = (int)(thread / 8) + j * (kThreads / 8);
                copy_async16(to + (u32)row * kXPitch, (const Vec4*)p.x + (u32)(token_of(row) * (p.x_stride / 8)) + from);
            }
        } else {
#pragma unroll
            for (int j = 0; j < kXPieces; ++j) {
                const u32 at = to + ((thread / 8) + (u32)j * (kThreads / 8)) * kXPitch;
                st_shared4(at, Vec4{0, 0, 0, 0});
            }
        }
    }

    // ---- products ---------------------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void consume(const Pair& own, int tile, int slot, Sums& part, Sums& sums) const {
        u32 words[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Vec4 v = ld_shared4(stage(slot) + kWeights + (u32)((2 * me.pair + i) * kTileBytes + me.lane * 16));
            words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
        }
        const u32 x_row = stage(slot) + (u32)(me.token + me.lane % 8) * kXPitch + (u32)(me.lane / 8) * 16;
        typename Pair::Scales scales;
        const u32 row = stage(slot) + kScales + ((u32)(me.pair * kPairColumns) << Scale::kShift);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool fresh = kFold == 0 || (kFold == 1 && half == 0);
            if (kFold == 0 || half == 0) scales = own.scales_at(row + (u32)half * kScaleRowBytes);
            typename Pair::Operands a;
            own.unpack_half_tile(words, half, a);
#pragma unroll
            for (int t = 0; t < kMt; ++t) {
                own.multiply(a, t, fresh, x_row + (u32)t * 8 * kXPitch + (u32)half * 64, part);
                // At once: a part that waited for the others would cost registers that are not there.
                if (kFold == 0) own.template fold_tile<false>(scales, t, part, sums);
            }
        }
        if (kFold == 1) own.template fold<false>(scales, part, sums);
        const bool group_ends = ((tile + 1) & ((1 << p.group_shift) - 1)) == 0 || tile == end - 1;
        if (kFold == 2 && group_ends) own.template fold<true>(scales, part, sums);
    }

    // ---- the launch -------------------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void run() const {
        const Pair own = pair_of(me);
        // Weights never depend on an earlier kernel: fill the ring with them before waiting for x.
        for (int slot = 0; slot < kStages - 1; ++slot) {
            if (begin + slot < end) fetch_weights(begin + slot, slot);
        }
        wait_for_previous_kernel();
        for (int slot = 0; slot < kStages - 1; ++slot) {
            if (begin + slot < end) fetch_x(begin + slot, slot);
            copy_async_commit();
        }
        Sums part, sums;
        own.clear(part);
        own.clear(sums);
        int slot = 0;
        for (int tile = begin; tile < end; ++tile) {
            copy_async_wait<kStages - 2>();
            block_sync();
            const int next = tile + kStages - 1;
            if (next < end) {
                const int free_slot = slot == 0 ? kStages - 1 : slot - 1;
                fetch_weights(next, free_slot);
                fetch_x(next, free_slot);
            }
            copy_async_commit();
            // A warp without outputs or tokens brings its pieces and waits with the others.
            if (works(me)) consume(own, tile, slot, part, sums);
            if (++slot == kStages) slot = 0;
        }
        let_next_kernel_start();
        own.to_units(sums);
        finish(place_of(thread_index_anew(), block_x_anew()), sums);
    }

    LQ_DEVICE_METHOD Pair pair_of(const Place& at) const {
        const int pairs = (p.n / 16 + 1) / 2;
        const int first_token = at.token0 + at.token;
        const int token_groups = (p.m + 8 * kMt - 1) / (8 * kMt);
        return {p, at.lane, token_groups * pairs, first_token / (8 * kMt) * pairs, first_token};
    }

    LQ_DEVICE_METHOD bool works(const Place& at) const {
        return at.strip0 + 2 * at.pair < p.n / 16 && at.token0 + at.token < p.m;
    }

    LQ_DEVICE_METHOD void finish(const Place& at, const Sums& sums) const {
        if (!works(at)) return;
        const Pair own = pair_of(at);
        const int pair = at.strip0 / 2 + at.pair;
        own.finish_slice(pair, sums);
        if (grid_y() > 1) join(own, pair);
    }

    // The warp that brings a unit's last slice adds all of them, in order, and leaves the counter at zero.
    LQ_DEVICE_METHOD void join(const Pair& own, int pair) const {
        warp_sync();
        fence_gpu();  // in the lane that counts, and behind the barrier: so it covers what the whole warp wrote
        u32 last = 0;
        if (own.lane == 0) {
            u32* counter = (u32*)p.counters + own.first_unit + pair;
            last = atomic_add(counter, 1) == (u32)grid_y() - 1 ? 1u : 0u;
            if (last) st_global1(counter, 0);
        }
        fence_gpu();  // and before the barrier, for the lanes that did not count
        warp_sync();
        if (shuffle_from(last, 0) != 0) own.join_slices_of(pair);
    }
};

}  // namespace loopq

#ifdef LQ_TOKEN_WARPS
LQ_KERNEL void __launch_bounds__(256, 1) loopq_w4a16_tiled(
    const void* x, const void* weights, const void* scales, void* out, const void* bias, const void* addend,
    void* partials, void* counters, int m, int n, int k_tiles, int k_begin, int k_end,
    int x_stride, int out_stride, int addend_stride, int group_shift, int scale_rows, int flags,
    int levels0, int levels4, int levels8, int levels12) {
    const loopq::Arguments arguments = {x, weights, scales, out, bias, addend, partials, counters,
                                        m, n, k_tiles, k_begin, k_end,
                                        x_stride, out_stride, addend_stride, group_shift, scale_rows, flags,
                                        {(u32)levels0, (u32)levels4, (u32)levels8, (u32)levels12}};
    loopq::Tiled<loopq::LQ_ACT, loopq::LQ_SCALE, LQ_TOKEN_WARPS, LQ_FOLD, LQ_STAGES> tiled(arguments);
    tiled.run();
}
#endif
