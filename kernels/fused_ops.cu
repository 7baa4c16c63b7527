// The small operations of a recurrent block, one launch each: residual with one or two norms; bias, rotation
// and attention of short sequences; SwiGLU. They compute in float32 and round each stored value once.
// Contract: kernels/README.md.

#include "primitives.cuh"

namespace loopq {

struct Bf16Io {
    LQ_DEVICE_MEMBER float load(u16 v) { return bf16_to_float(v); }
    LQ_DEVICE_MEMBER u16 round(float v) { return float_to_bf16(v); }
};

struct Fp16Io {
    LQ_DEVICE_MEMBER float load(u16 v) { return f16_to_float(v); }
    LQ_DEVICE_MEMBER u16 round(float v) { return float_to_f16(v); }
};

template <class Io>
LQ_DEVICE void load8(const u16* p, float (&v)[8]) {
    const Vec4 raw = ld_global4(p);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = Io::load((u16)(words[i] & 0xffffu));
        v[2 * i + 1] = Io::load((u16)(words[i] >> 16));
    }
}

// Rounds and stores; `v` becomes what was stored.
template <class Io>
LQ_DEVICE void store8(u16* p, float (&v)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u16 low = Io::round(v[2 * i]), high = Io::round(v[2 * i + 1]);
        v[2 * i] = Io::load(low);
        v[2 * i + 1] = Io::load(high);
        words[i] = (u32)low | ((u32)high << 16);
    }
    st_global4(p, Vec4{words[0], words[1], words[2], words[3]});
}

// The same sum in every thread; the order is fixed. `scratch` holds one float per warp.
LQ_DEVICE float block_sum(float v, u32 scratch) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    const int warp = thread_index() / 32, warps = thread_count() / 32;
    if (thread_index() % 32 == 0) st_shared1(scratch + (u32)warp * 4, float_to_bits(v));
    block_sync();
    float sum = 0.0f;
    for (int i = 0; i < warps; ++i) sum += bits_to_float(ld_shared1(scratch + (u32)i * 4));
    block_sync();
    return sum;
}

struct NormArguments {
    const void* a;         // [rows, width]
    const void* residual;  // [rows, width], or null
    const void* weight1;   // [width]
    const void* weight2;   // [width], or null: no second norm
    void* y;               // [rows, width] rms(a + residual) * weight1
    void* z;               // [rows, width] rms(y) * weight2
    int width, a_stride, residual_stride, y_stride, z_stride;
    float epsilon;
};

// One block per row; a thread keeps up to kPieces x 8 elements in registers.
template <class Io>
struct AddNorm {
    static constexpr int kPieces = 4;

    LQ_DEVICE_MEMBER float inverse_rms(const float (&v)[kPieces][8], int width, float epsilon) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = fma_rn(v[i][j], v[i][j], squares);
        const float mean = div_rn(block_sum(squares, shared_base()), (float)width);
        return div_rn(1.0f, sqrt_rn(mean + epsilon));
    }

    LQ_DEVICE_MEMBER void scale_and_store(float (&v)[kPieces][8], float factor, const void* weight, u16* row, int width) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int at = (i * thread_count() + thread_index()) * 8;
            if (at < width) {
                float w[8];
                load8<Io>((const u16*)weight + at, w);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i][j] = v[i][j] * factor * w[j];
                store8<Io>(row + at, v[i]);
            }
        }
    }

    LQ_DEVICE_MEMBER void run(const NormArguments& p) {
        const long long row = block_x();
        float v[kPieces][8];
        wait_for_previous_kernel();
        let_next_kernel_start();
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int at = (i * thread_count() + thread_index()) * 8;
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = 0.0f;
            if (at < p.width) {
                load8<Io>((const u16*)p.a + row * p.a_stride + at, v[i]);
                if (p.residual) {
                    float r[8];
                    load8<Io>((const u16*)p.residual + row * p.residual_stride + at, r);
#pragma unroll
                    for (int j = 0; j < 8; ++j) v[i][j] += r[j];
                }
            }
        }
        scale_and_store(v, inverse_rms(v, p.width, p.epsilon), p.weight1, (u16*)p.y + row * p.y_stride, p.width);
        if (p.weight2) {
            scale_and_store(v, inverse_rms(v, p.width, p.epsilon), p.weight2, (u16*)p.z + row * p.z_stride, p.width);
        }
    }
};

struct AttentionArguments {
    const void* qkv;       // [sequences * tokens, 3 * heads * head]
    const void* qk_bias;   // [2, heads, head], or null
    const void* rotation;  // [tokens, head / 2, 2] float32: cosine, sine
    void* out;             // [sequences * tokens, heads * head]
    int tokens, heads, head, qkv_stride, out_stride;
    float scale;
};

// One block per head and sequence. Rotated q (times scale), rotated k, and v lie in shared memory as float32,
// rows one float apart from a multiple of the bank count for even heads.
template <class Io>
struct Attention {
    static constexpr int kHeadLanes = 4;  // head <= 32 * kHeadLanes

    LQ_DEVICE_MEMBER u32 at(int matrix, int token, int i, const AttentionArguments& p) {
        return shared_base() + (u32)(((matrix * p.tokens + token) * (p.head + 1) + i) * 4);
    }

    LQ_DEVICE_MEMBER void stage(const AttentionArguments& p) {
        const int head_index = block_x();
        const int half = p.head / 2;
        for (int i = thread_index(); i < p.tokens * half; i += thread_count()) {
            const int token = i / half, pair = i - token * half;
            const long long row = (long long)block_y() * p.tokens + token;
            const float* turn = (const float*)p.rotation + ((long long)token * half + pair) * 2;
            const float c = bits_to_float(ld_global1(turn)), s = bits_to_float(ld_global1(turn + 1));
#pragma unroll
            for (int m = 0; m < 3; ++m) {
                const u16* from = (const u16*)p.qkv + row * p.qkv_stride + (m * p.heads + head_index) * p.head + 2 * pair;
                const u32 both = ld_global1(from);
                float even = Io::load((u16)(both & 0xffffu)), odd = Io::load((u16)(both >> 16));
                if (m < 2) {
                    if (p.qk_bias) {
                        const u32 bias = ld_global1((const u16*)p.qk_bias + (m * p.heads + head_index) * p.head + 2 * pair);
                        even += Io::load((u16)(bias & 0xffffu));
                        odd += Io::load((u16)(bias >> 16));
                    }
                    const float turned = even * c - odd * s;
                    odd = odd * c + even * s;
                    even = turned;
                    if (m == 0) even *= p.scale, odd *= p.scale;
                }
                st_shared1(at(m, token, 2 * pair, p), float_to_bits(even));
                st_shared1(at(m, token, 2 * pair + 1, p), float_to_bits(odd));
            }
        }
    }

    LQ_DEVICE_MEMBER float score(int query, int key, const AttentionArguments& p) {
        if (key > query) return -3.0e38f;
        float sum = 0.0f;
        for (int i = 0; i < p.head; ++i) {
            sum = fma_rn(bits_to_float(ld_shared1(at(0, query, i, p))), bits_to_float(ld_shared1(at(1, key, i, p))), sum);
        }
        return sum;
    }

    // One warp per query: lane l scores keys l and l + 32, then gathers outputs l, l + 32, ...
    LQ_DEVICE_MEMBER void attend(int query, const AttentionArguments& p) {
        const int lane = thread_index() % 32;
        float first = score(query, lane, p), second = score(query, lane + 32, p);
        float top = first > second ? first : second;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const float other = shuffle_xor(top, mask);
            top = other > top ? other : top;
        }
        first = lane <= query ? exp_approx(first - top) : 0.0f;
        second = lane + 32 <= query ? exp_approx(second - top) : 0.0f;
        float total = first + second;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
        float gathered[kHeadLanes] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int key = 0; key <= query; ++key) {
            const float weight = bits_to_float(shuffle_from(float_to_bits(key < 32 ? first : second), key % 32));
#pragma unroll
            for (int i = 0; i < kHeadLanes; ++i) {
                if (i * 32 + lane < p.head) {
                    gathered[i] = fma_rn(weight, bits_to_float(ld_shared1(at(2, key, i * 32 + lane, p))), gathered[i]);
                }
            }
        }
        const long long row = (long long)block_y() * p.tokens + query;
        u16* to = (u16*)p.out + row * p.out_stride + block_x() * p.head;
#pragma unroll
        for (int i = 0; i < kHeadLanes; ++i) {
            if (i * 32 + lane < p.head) st_global_half(to + i * 32 + lane, Io::round(div_rn(gathered[i], total)));
        }
    }

    LQ_DEVICE_MEMBER void run(const AttentionArguments& p) {
        wait_for_previous_kernel();
        let_next_kernel_start();
        stage(p);
        block_sync();
        for (int query = thread_index() / 32; query < p.tokens; query += thread_count() / 32) attend(query, p);
    }
};

struct SwigluArguments {
    const void* gate_up;  // [rows, 2 * width], gate first
    void* out;            // [rows, width]
    int rows, width, gate_up_stride, out_stride;
};

template <class Io>
LQ_DEVICE void swiglu(const SwigluArguments& p) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int pieces = p.width / 8;
    const long long all = (long long)p.rows * pieces;
    const long long step = (long long)grid_x() * thread_count();
    for (long long i = (long long)block_x() * thread_count() + thread_index(); i < all; i += step) {
        const long long row = i / pieces, at = (i - row * pieces) * 8;
        float gate[8], up[8];
        load8<Io>((const u16*)p.gate_up + row * p.gate_up_stride + at, gate);
        load8<Io>((const u16*)p.gate_up + row * p.gate_up_stride + p.width + at, up);
#pragma unroll
        for (int j = 0; j < 8; ++j) gate[j] = div_rn(gate[j], 1.0f + exp_approx(-gate[j])) * up[j];
        store8<Io>((u16*)p.out + row * p.out_stride + at, gate);
    }
}

}  // namespace loopq

#ifdef LQ_IO
LQ_KERNEL void __launch_bounds__(512) loopq_add_norm(
    const void* a, const void* residual, const void* weight1, const void* weight2, void* y, void* z,
    int width, int a_stride, int residual_stride, int y_stride, int z_stride, float epsilon) {
    const loopq::NormArguments arguments = {a, residual, weight1, weight2, y, z,
                                            width, a_stride, residual_stride, y_stride, z_stride, epsilon};
    loopq::AddNorm<loopq::LQ_IO>::run(arguments);
}

LQ_KERNEL void __launch_bounds__(256) loopq_rope_attention(
    const void* qkv, const void* qk_bias, const void* rotation, void* out,
    int tokens, int heads, int head, int qkv_stride, int out_stride, float scale) {
    const loopq::AttentionArguments arguments = {qkv, qk_bias, rotation, out,
                                                 tokens, heads, head, qkv_stride, out_stride, scale};
    loopq::Attention<loopq::LQ_IO>::run(arguments);
}

LQ_KERNEL void __launch_bounds__(256) loopq_swiglu(
    const void* gate_up, void* out, int rows, int width, int gate_up_stride, int out_stride) {
    const loopq::SwigluArguments arguments = {gate_up, out, rows, width, gate_up_stride, out_stride};
    loopq::swiglu<loopq::LQ_IO>(arguments);
}
#endif
