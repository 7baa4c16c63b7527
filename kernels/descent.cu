// Coordinate descent of rows on tr(D S D^T), on codes and on the scales of a group (loopq.quantizers.twin.descent), in double
// precision. Products and sums are rounded one by one, so that a host run gives the same bits. Contract: kernels/README.md.

#include "primitives.cuh"

namespace loopq {

struct DescentArguments {
    void* steps;           // [rows, columns] float: values of the codes in scales
    void* values;          // [rows, columns] double: with their scales
    void* gradient;        // [rows, columns] double: D S
    void* loss;            // [rows] double
    void* scale;           // [rows, groups] float
    const void* zero;      // [rows, groups] float
    const void* active;    // [rows] int: other rows stay
    const void* matrix;    // [matrices, columns, columns] double: S
    const void* energy;    // [matrices, columns] double: its diagonal
    const void* levels;    // [top + 1] float, or null: a code's value is code - zero
    const void* between;   // [top] double: midpoints of the levels
    void* out;             // of codes: [rows] int64, the changes; of scales: [rows, width] double, what was added to `values`
    int rows_per_matrix, columns, width, top;
    int number;       // of codes: the most sweeps; of scales: the group
    int scale_kind;   // 0 float32, 1 float16, 2 bfloat16; 4 added: of any sign
};

struct Descent {
    const DescentArguments& p;
    const long long row;
    const double* square;  // S of this row

    LQ_DEVICE_METHOD explicit Descent(const DescentArguments& arguments)
        : p(arguments), row(block_x()),
          square((const double*)arguments.matrix + block_x() / arguments.rows_per_matrix * (long long)arguments.columns * arguments.columns) {}

    LQ_DEVICE_MEMBER float single(const void* values, long long at) { return bits_to_float(ld_global1((const float*)values + at)); }
    LQ_DEVICE_MEMBER double wide(const void* values, long long at) { return ld_global_double((const double*)values + at); }
    LQ_DEVICE_METHOD bool active() const { return ld_global1((const u32*)p.active + row) != 0; }
    LQ_DEVICE_METHOD long long groups() const { return (p.columns + p.width - 1) / p.width; }

    // The change of a column's value that lowers the loss most, the gain (negative is good), and the new value in scales.
    LQ_DEVICE_METHOD double change(int column, double& gain, float& step) const {
        const long long at = row * p.columns + column, of_group = row * groups() + column / p.width;
        const double value = wide(p.values, at), gradient = wide(p.gradient, at);
        const double energy = wide(p.energy, row / p.rows_per_matrix * p.columns + column);
        const float scale = single(p.scale, of_group);
        const double wanted = (value - gradient / energy) / (double)scale;
        if (p.levels) {
            int place = 0;
            for (int i = 0; i < p.top; ++i) place += wanted >= wide(p.between, i);
            step = single(p.levels, place);
        } else {
            const double zero = (double)single(p.zero, of_group), high = (double)p.top - zero, near = round_even(wanted);
            step = (float)(near < -zero ? -zero : near > high ? high : near);
        }
        const double by = (double)(step * scale) - value;
        gain = mul_rn(by, add_rn(mul_rn(2.0, gradient), mul_rn(by, energy)));
        return by;
    }

    // The least number of the block's threads. `slots` holds a word per warp.
    LQ_DEVICE_MEMBER u32 least(u32 v, u32 slots) {
        const int warps = thread_count() / 32;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const u32 theirs = shuffle_xor(v, mask);
            v = theirs < v ? theirs : v;
        }
        if (thread_index() % 32 == 0) st_shared1(slots + (u32)(thread_index() / 32) * 4, v);
        block_sync();
        for (int i = 0; i < warps; ++i) {
            const u32 theirs = ld_shared1(slots + (u32)i * 4);
            v = theirs < v ? theirs : v;
        }
        return v;
    }

    // One code at a time: the next column with a gain, in a circle. Shared memory: 16 bytes for the change,
    // then two words per warp, used in turn.
    LQ_DEVICE_METHOD void codes() const {
        const int d = p.columns, threads = thread_count(), t = thread_index();
        const u32 chosen = shared_base();
        int passed = 0, sweeps = 0, moves = 0, turn = 0;
        double loss = t == 0 ? wide(p.loss, row) : 0.0;
        bool going = active();
        while (going) {
            u32 found = (u32)d;
            for (int start = 0; start < d && found == (u32)d; start += threads) {
                u32 own = (u32)d;
                double by = 0.0, gain = 0.0;
                float step = 0.0f;
                int column = passed + start + t;
                if (column >= d) column -= d;
                if (start + t < d) {
                    by = change(column, gain, step);
                    if (gain < 0.0) own = (u32)(start + t);
                }
                found = least(own, chosen + 16 + (u32)(turn * (threads / 32) * 4));
                turn = 1 - turn;
                going = found < (u32)d && sweeps + (passed + (int)found >= d) < p.number;
                if (going && own == found) {
                    const long long at = row * d + column;
                    st_shared_double(chosen, by);
                    st_shared_double(chosen + 8, gain);
                    st_global_double((double*)p.values + at, add_rn(wide(p.values, at), by));
                    st_global1((float*)p.steps + at, float_to_bits(step));
                }
            }
            going = found < (u32)d && sweeps + (passed + (int)found >= d) < p.number;
            if (!going) break;
            block_sync();
            const double by = ld_shared_double(chosen);
            loss = add_rn(loss, ld_shared_double(chosen + 8));
            const int column = (passed + (int)found) % d;
            sweeps += passed + (int)found >= d;
            add_line(by, column);
            passed = column + 1;
            ++moves;
            block_sync();
        }
        if (t == 0) {
            st_global_double((double*)p.loss + row, loss);
            st_global2((u64*)p.out + row, (u32)moves, 0);
        }
    }

    // The gradient grows by a line of S. Several loads are under way at once.
    LQ_DEVICE_METHOD void add_line(double by, int column) const {
        constexpr int kAtOnce = 4;
        const int d = p.columns, threads = thread_count();
        double* gradient = (double*)p.gradient + row * d;
        for (int first = thread_index(); first < d; first += kAtOnce * threads) {
            double line[kAtOnce], old[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int k = first + i * threads;
                line[i] = k < d ? wide(square, (long long)column * d + k) : 0.0;
                old[i] = k < d ? wide(gradient, k) : 0.0;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int k = first + i * threads;
                if (k < d) st_global_double(gradient + k, add_rn(old[i], mul_rn(by, line[i])));
            }
        }
    }

    // The sum of all threads' numbers, in every thread. `slots` holds a double per thread.
    LQ_DEVICE_MEMBER double sum(double v, u32 slots) {
        block_sync();
        st_shared_double(slots + (u32)thread_index() * 8, v);
        block_sync();
        double total = 0.0;
        for (int i = 0; i < thread_count(); ++i) total = add_rn(total, ld_shared_double(slots + (u32)i * 8));
        return total;
    }

    // x S of this group, for column `to`; x, of `n` numbers, lies in shared memory.
    LQ_DEVICE_METHOD double times_square(u32 x, int first, int n, int to) const {
        double total = 0.0;
        for (int i = 0; i < n; ++i) {
            total = add_rn(total, mul_rn(ld_shared_double(x + (u32)i * 8), wide(square, (long long)(first + i) * p.columns + first + to)));
        }
        return total;
    }

    LQ_DEVICE_METHOD float rounded(double scale) const {
        const float v = (float)scale;
        const int kind = p.scale_kind % 4;
        return kind == 1 ? f16_to_float(float_to_f16(v)) : kind == 2 ? bf16_to_float(float_to_bf16(v)) : v;
    }

    // The best scale of one group. Shared memory: a double per thread, then one per column of the group.
    LQ_DEVICE_METHOD void scales() const {
        const int threads = thread_count(), t = thread_index(), first = p.number * p.width;
        const int n = p.columns - first < p.width ? p.columns - first : p.width;
        const u32 slots = shared_base(), x = slots + (u32)threads * 8;
        const long long at = row * p.columns + first, of_group = row * groups() + p.number;
        const float old = single(p.scale, of_group);
        for (int j = t; j < n; j += threads) st_shared_double(x + (u32)j * 8, (double)single(p.steps, at + j));
        block_sync();
        double slope = 0.0, curve = 0.0;
        for (int j = t; j < n; j += threads) {
            const double step = ld_shared_double(x + (u32)j * 8);
            slope = add_rn(slope, mul_rn(step, wide(p.gradient, at + j)));
            curve = add_rn(curve, mul_rn(step, times_square(x, first, n, j)));
        }
        slope = sum(slope, slots);
        curve = sum(curve, slots);
        float best = rounded((double)old - slope / curve);
        const bool finite = (float_to_bits(best) & 0x7f800000u) != 0x7f800000u;
        if (!finite || best == 0.0f || !active() || (p.scale_kind < 4 && best < 0.0f)) best = old;
        block_sync();
        for (int j = t; j < n; j += threads) {
            st_shared_double(x + (u32)j * 8, (double)(single(p.steps, at + j) * best) - wide(p.values, at + j));
        }
        block_sync();
        double gain = 0.0;
        for (int j = t; j < n; j += threads) {
            const double by = ld_shared_double(x + (u32)j * 8);
            gain = add_rn(gain, mul_rn(by, add_rn(mul_rn(2.0, wide(p.gradient, at + j)), times_square(x, first, n, j))));
        }
        gain = sum(gain, slots);
        const bool less = gain < 0.0 && best != old;
        for (int j = t; j < n; j += threads) {
            const double by = less ? ld_shared_double(x + (u32)j * 8) : 0.0;
            st_global_double((double*)p.out + row * p.width + j, by);
            if (less) st_global_double((double*)p.values + at + j, add_rn(wide(p.values, at + j), by));
        }
        if (t == 0 && less) {
            st_global1((float*)p.scale + of_group, float_to_bits(best));
            st_global_double((double*)p.loss + row, add_rn(wide(p.loss, row), gain));
        }
    }

    LQ_DEVICE_MEMBER void start(const DescentArguments& p, bool codes) {
        wait_for_previous_kernel();
        let_next_kernel_start();
        const Descent descent(p);
        codes ? descent.codes() : descent.scales();
    }
};

}  // namespace loopq

#ifdef LQ_CODES
LQ_KERNEL void __launch_bounds__(LQ_CODES ? 512 : 128) loopq_descent(
    void* steps, void* values, void* gradient, void* loss, void* scale, const void* zero, const void* active, const void* matrix,
    const void* energy, const void* levels, const void* between, void* out, int rows_per_matrix, int columns, int width, int top,
    int number, int scale_kind) {
    const loopq::DescentArguments arguments = {steps, values, gradient, loss, scale, zero, active, matrix, energy, levels, between,
                                               out, rows_per_matrix, columns, width, top, number, scale_kind};
    loopq::Descent::start(arguments, LQ_CODES);
}
#endif
