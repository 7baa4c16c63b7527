// w[N, K] = s * q from the packed layout, in the activation type, for the dequantise-and-multiply path of many tokens.
// Each value is rounded once. Contract: kernels/README.md.

#include "primitives.cuh"
#include "levels.cuh"

namespace loopq {

struct DequantizeArguments {
    const void* weights;  // [n/16, k_tiles, 128] words
    const void* scales;   // [scale_rows, n] float32 (kind 0), bf16 (1) or fp16 (2)
    void* out;            // [n, k], row stride k
    int n, k, k_tiles, group_size, scale_rows, scale_kind;
    Vec4 table;           // of levels (kTable)
};

template <bool kFloat16, bool kTable>
struct Dequantize {
    LQ_DEVICE_MEMBER float scale_at(const DequantizeArguments& p, int k, int n) {
        const int group = k / p.group_size;
        const long long at = (long long)(group < p.scale_rows ? group : p.scale_rows - 1) * p.n + n;
        if (p.scale_kind == 0) return bits_to_float(ld_global1((const float*)p.scales + at));
        const u16 bits = ld_global_half((const u16*)p.scales + at);
        return p.scale_kind == 1 ? bf16_to_float(bits) : f16_to_float(bits);
    }

    // The eight codes of a word less 8, or their levels.
    struct Values {
        float at[8];

        LQ_DEVICE_METHOD Values(const DequantizeArguments& p, u32 word) {
            u32 bytes[2];
            if (kTable) look_up(p.table, word, bytes);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                at[i] = kTable ? (float)((int)(bytes[i / 4] >> 8 * (i % 4) & 255u) - kZeroLevel) * kLevelStep
                               : (float)((int)(word >> 4 * i & 15u) - 8);
            }
        }
    };

    LQ_DEVICE_MEMBER u32 round(float product) { return kFloat16 ? float_to_f16(product) : float_to_bf16(product); }

    LQ_DEVICE_MEMBER u32 pair(const Values& values, int part, float scale) {
        return round(values.at[part] * scale) | (round(values.at[part + 4] * scale) << 16);
    }

    // One warp per tile; a lane holds, of each step of 16 inputs, pairs (k, k + 1) at k and k + 8 of two outputs. Two
    // neighbours exchange a pair, so that each has four inputs in a row and four lanes fill a sector of 32 bytes.
    LQ_DEVICE_MEMBER void run(const DequantizeArguments& p) {
        // An earlier kernel may still read what `out` held before.
        wait_for_previous_kernel();
        let_next_kernel_start();
        const long long tiles = (long long)(p.n / 16) * p.k_tiles;
        const long long step = (long long)grid_x() * (thread_count() / 32);
        const int lane = thread_index() % 32;
        for (long long tile = (long long)block_x() * (thread_count() / 32) + thread_index() / 32; tile < tiles; tile += step) {
            const int strip = (int)(tile / p.k_tiles);
            const int tile_k = (int)(tile % p.k_tiles) * 64;
            const bool odd = lane % 2 != 0;
            const Vec4 v = ld_global4((const char*)p.weights + tile * 512 + lane * 16);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // The same for all lanes: k ends at a multiple of 32.
                const int first_k = tile_k + j * 16;
                if (first_k >= p.k) continue;
                const Values values(p, words[j]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int n = strip * 16 + lane / 4 + half * 8;
                    const float scale = scale_at(p, first_k, n);
                    const u32 low = pair(values, 2 * half, scale);
                    const u32 high = pair(values, 2 * half + 1, scale);
                    const u32 other = shuffle_xor(odd ? low : high, 1);
                    const int k = first_k + lane % 4 / 2 * 4 + (odd ? 8 : 0);
                    st_global2((u16*)p.out + (long long)n * p.k + k, odd ? other : low, odd ? high : other);
                }
            }
        }
    }
};

}  // namespace loopq

#ifdef LQ_FLOAT16
// Six blocks: with none asked for, the compiler keeps eight and spills the table.
LQ_KERNEL void __launch_bounds__(256, 6) loopq_w4_dequantize(
    const void* weights, const void* scales, void* out, int n, int k, int k_tiles, int group_size, int scale_rows,
    int scale_kind, int levels0, int levels4, int levels8, int levels12) {
    const loopq::DequantizeArguments arguments = {weights, scales, out, n, k, k_tiles, group_size, scale_rows, scale_kind,
                                                  {(u32)levels0, (u32)levels4, (u32)levels8, (u32)levels12}};
    loopq::Dequantize<LQ_FLOAT16, LQ_TABLE>::run(arguments);
}
#endif
