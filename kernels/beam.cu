// One block of 64 columns of GPTQ's sweep with several open paths of codes in each row (loopq.quantizers.twin.beam).
// Contract: kernels/README.md.

#include "primitives.cuh"

namespace loopq {

struct BeamArguments {
    void* ahead;           // [rows, paths, 64] weights moved by all errors before the block; becomes the codes
    void* origin;          // [rows, paths] int64: the path each path comes from
    void* cost;            // [rows, paths] above the best; becomes that after the block
    const void* original;  // [rows, 128], of which the last 64 columns are read, as of the next two
    const void* scale;
    const void* zero;
    const void* upper;    // [matrices, 128, 64], of which the last 64 rows are read: unit upper triangles
    const void* pivots;   // [matrices, 64]
    const void* levels;   // [top + 1], or null: a code's value is code - zero
    const void* between;  // [top] midpoints of the levels
    int rows, rows_per_matrix, top;
};

// A warp per row. Each path has two codes to go on with; the cheapest kPaths of these candidates become the new paths.
template <int kPaths>
struct Beam {
    static constexpr int kBlock = 64, kStride = kBlock + 1;  // the last word of a path is its origin
    static constexpr u32 kInfinity = 0x7f800000u;
    static constexpr int kEach = kPaths > 16 ? kPaths / 16 : 1;   // candidates of a lane
    static constexpr int kShare = kPaths < 32 ? 32 / kPaths : 1;  // lanes that copy a path
    static_assert(kPaths % 32 == 0 || 32 % kPaths == 0, "a power of two");

    const BeamArguments& p;
    const int lane;
    const u32 base;  // state[2][kPaths][kStride], then source, code, error and cost of each path, then a row of `upper`

    LQ_DEVICE_METHOD u32 state(int side, int path, int column) const {
        return base + (u32)(((side * kPaths + path) * kStride + column) * 4);
    }
    LQ_DEVICE_METHOD u32 of_path(int array, int path) const { return state(2, 0, array * kPaths + path); }
    LQ_DEVICE_METHOD u32 line(int column) const { return state(2, 0, 4 * kPaths + column); }

    LQ_DEVICE_MEMBER float load(const void* values, long long at) { return bits_to_float(ld_global1((const float*)values + at)); }

    LQ_DEVICE_METHOD float step(float code, float zero) const {
        return p.levels ? load(p.levels, (int)code) : code - zero;
    }

    // The nearest code, or the one on the other side of `wanted`, a value in scales. False if that one does not exist.
    LQ_DEVICE_METHOD bool choose(float wanted, float zero, bool other, float& code) const {
        const float top = (float)p.top;
        bool higher;
        if (p.levels) {
            int place = 0;
            for (int i = 0; i < p.top; ++i) place += wanted >= load(p.between, i);
            code = (float)place;
            higher = wanted > load(p.levels, place);
        } else {
            const float x = wanted + zero;
            code = round_even(x);
            code = code < 0.0f ? 0.0f : code > top ? top : code;
            higher = x > code;
        }
        if (!other) return true;
        const float next = higher ? code + 1.0f : code - 1.0f;
        const bool held = next < 0.0f || next > top;
        if (!held) code = next;
        return !held;
    }

    LQ_DEVICE_METHOD void run(long long row) const {
        const long long first = row * kPaths, matrix = row / p.rows_per_matrix;
        for (int i = lane; i < kPaths * kBlock; i += 32) {
            st_shared1(state(0, i / kBlock, i % kBlock), ld_global1((const float*)p.ahead + first * kBlock + i));
        }
        for (int path = lane; path < kPaths; path += 32) {
            st_shared1(state(0, path, kBlock), (u32)path);
            st_shared1(of_path(3, path), ld_global1((const float*)p.cost + first + path));
        }
        warp_sync();
        for (int at = 0; at < kBlock; ++at) extend(row, matrix, at);
        for (int i = lane; i < kPaths * kBlock; i += 32) {
            st_global1((float*)p.ahead + first * kBlock + i, ld_shared1(state(0, i / kBlock, i % kBlock)));
        }
        for (int path = lane; path < kPaths; path += 32) {
            st_global2((u64*)p.origin + first + path, ld_shared1(state(0, path, kBlock)), 0);
            st_global1((float*)p.cost + first + path, ld_shared1(of_path(3, path)));
        }
    }

    LQ_DEVICE_METHOD void extend(long long row, long long matrix, int at) const {
        const int now = at & 1;
        const long long column = row * 2 * kBlock + kBlock + at, of_line = (matrix * 2 * kBlock + kBlock + at) * kBlock;
        const float scale = load(p.scale, column), zero = load(p.zero, column), original = load(p.original, column);
        const float pivot = load(p.pivots, matrix * kBlock + at);
        const u32 low = ld_global1((const float*)p.upper + of_line + lane);
        const u32 high = ld_global1((const float*)p.upper + of_line + 32 + lane);
        float code[kEach], value[kEach], cost[kEach];
        int rank[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int path = (lane + 32 * i) % kPaths, side = (lane + 32 * i) / kPaths;
            const float wanted = bits_to_float(ld_shared1(state(now, path, at)));
            const bool exists = choose(div_rn(wanted, scale), zero, side == 1, code[i]);
            value[i] = step(code[i], zero);
            cost[i] = bits_to_float(kInfinity);
            rank[i] = 0;
            if (exists && side < 2) {
                const float gap = fma_rn(-value[i], scale, wanted);
                cost[i] = fma_rn(gap * gap, pivot, bits_to_float(ld_shared1(of_path(3, path))));
            }
        }
        // As in a stable sort: of equal costs the first.
        float best = cost[0];
#pragma unroll
        for (int other = 0; other < kEach; ++other) {
            for (int from = 0; from < 32; ++from) {
                const float theirs = bits_to_float(shuffle_from(float_to_bits(cost[other]), from));
                best = theirs < best ? theirs : best;
#pragma unroll
                for (int i = 0; i < kEach; ++i) {
                    rank[i] += theirs < cost[i] || (theirs == cost[i] && from + 32 * other < lane + 32 * i);
                }
            }
        }
        warp_sync();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (rank[i] >= kPaths) continue;
            st_shared1(of_path(0, rank[i]), (u32)((lane + 32 * i) % kPaths));
            st_shared1(of_path(1, rank[i]), float_to_bits(code[i]));
            st_shared1(of_path(2, rank[i]), float_to_bits(fma_rn(-value[i], scale, original)));
            st_shared1(of_path(3, rank[i]), float_to_bits(cost[i] - best));
        }
        st_shared1(line(lane), low);
        st_shared1(line(32 + lane), high);
        warp_sync();
        for (int part = lane; part < kPaths * kShare; part += 32) {
            const int path = part % kPaths, from = (int)ld_shared1(of_path(0, path));
            const u32 taken = ld_shared1(of_path(1, path));
            const float error = bits_to_float(ld_shared1(of_path(2, path)));
            for (int k = part / kPaths; k < kStride; k += kShare) {
                u32 v = ld_shared1(state(now, from, k));
                if (k == at) v = taken;
                if (k > at && k < kBlock) v = float_to_bits(fma_rn(error, bits_to_float(ld_shared1(line(k))), bits_to_float(v)));
                st_shared1(state(1 - now, path, k), v);
            }
        }
        warp_sync();
    }

    LQ_DEVICE_MEMBER void start(const BeamArguments& p) {
        wait_for_previous_kernel();
        let_next_kernel_start();
        const int warp = thread_index() / 32;
        const long long row = (long long)block_x() * (thread_count() / 32) + warp;
        const u32 own = (u32)((2 * kPaths * kStride + 4 * kPaths + kBlock) * 4);
        if (row < p.rows) Beam{p, thread_index() % 32, shared_base() + (u32)warp * own}.run(row);
    }
};

}  // namespace loopq

#ifdef LQ_PATHS
LQ_KERNEL void __launch_bounds__(128) loopq_beam(
    void* ahead, void* origin, void* cost, const void* original, const void* scale, const void* zero, const void* upper,
    const void* pivots, const void* levels, const void* between, int rows, int rows_per_matrix, int top) {
    const loopq::BeamArguments arguments = {ahead, origin, cost, original, scale, zero, upper, pivots, levels, between,
                                            rows, rows_per_matrix, top};
    loopq::Beam<LQ_PATHS>::start(arguments);
}
#endif
