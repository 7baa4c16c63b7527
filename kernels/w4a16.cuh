// Code shared by the int4 products: types, the conversion of codes to operands, and one warp's work on a pair
// of strips.
//
// A *pair* is two neighbouring strips of 16 outputs. A warp multiplies both with the same fragments of x, for kMt tiles of
// 8 tokens. Its float32 sums are a *unit*: the pair's outputs for the warp's tokens. Include primitives.cuh
// and levels.cuh first.

#ifndef LOOPQ_W4A16_CUH
#define LOOPQ_W4A16_CUH

namespace loopq {

constexpr int kTileRows = 64;     // K per tile
constexpr int kTileBytes = 512;   // 64 x 16 int4
constexpr int kPairColumns = 32;

enum Flags : int {
    kOutFloat32 = 1,  // else the activation type
    kEvictFirst = 2   // weights leave the L2 first
};

// Types of scales: bytes as a shift, and the way to float32.
struct ScaleF32 {
    static constexpr int kShift = 2;
    LQ_DEVICE_MEMBER float load(u32 row, int column) { return bits_to_float(ld_shared1(row + (u32)column * 4)); }
};
struct ScaleBf16 {
    static constexpr int kShift = 1;
    LQ_DEVICE_MEMBER float load(u32 row, int column) { return bf16_to_float(ld_shared_half(row + (u32)column * 2)); }
};
struct ScaleFp16 {
    static constexpr int kShift = 1;
    LQ_DEVICE_MEMBER float load(u32 row, int column) { return f16_to_float(ld_shared_half(row + (u32)column * 2)); }
};

// Activation types. Two nibbles of each half-word are read in place, at bits 0-3 and 4-7. A 16-bit float that small is
// subnormal or (bfloat16, bit 7) has the lowest exponent, so its value is its bits times the smallest subnormal.
// One fused multiply-add makes that (u - 8) / kUnit, exactly; the sums are multiplied by kUnit where they leave.
struct Bf16 {
    static constexpr u32 kFromBit0 = 0x7f007f00u;     // 2^127: u * 2^-133 becomes u / 64
    static constexpr u32 kFromBit4 = 0x7d007d00u;     // 2^123
    static constexpr u32 kMinusEight = 0xbe00be00u;   // -8 / 64
    static constexpr u32 kMinusZero = 0xc000c000u;    // -kZeroLevel / 64
    static constexpr float kUnit = 64.0f;
    LQ_DEVICE_MEMBER u32 fma2(u32 a, u32 b, u32 c) { return fma_bf16x2(a, b, c); }
    LQ_DEVICE_MEMBER void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
    LQ_DEVICE_MEMBER void mma_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16_new(c, a, b0, b1); }
    LQ_DEVICE_MEMBER u16 round(float v) { return float_to_bf16(v); }
};

struct Fp16 {
    static constexpr u32 kFromBit0 = 0x78007800u;     // 2^15: u * 2^-24 becomes u / 512
    static constexpr u32 kFromBit4 = 0x68006800u;     // 2^11
    static constexpr u32 kMinusEight = 0xa400a400u;   // -8 / 512
    static constexpr u32 kMinusZero = 0xb400b400u;    // -kZeroLevel / 512
    static constexpr float kUnit = 512.0f;
    LQ_DEVICE_MEMBER u32 fma2(u32 a, u32 b, u32 c) { return fma_f16x2(a, b, c); }
    LQ_DEVICE_MEMBER void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
    LQ_DEVICE_MEMBER void mma_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16_new(c, a, b0, b1); }
    LQ_DEVICE_MEMBER u16 round(float v) { return float_to_f16(v); }
};

// Either type with levels of a table. A byte of the table is such a small float too, at bits 0-7.
template <class Act>
struct Table : Act {
    static constexpr float kUnit = Act::kUnit * kLevelStep;
};
typedef Table<Bf16> TableBf16;
typedef Table<Fp16> TableFp16;

// Eight codes to an A fragment. Even k sits in the low half-words, odd k in the high ones, so one AND yields a packed pair.
template <class Act>
LQ_DEVICE void unpack(Act, const Vec4&, u32 word, u32 (&a)[4]) {
    const u32 high = word >> 8;
    a[0] = Act::fma2(word & 0x000f000fu, Act::kFromBit0, Act::kMinusEight);
    a[2] = Act::fma2(word & 0x00f000f0u, Act::kFromBit4, Act::kMinusEight);
    a[1] = Act::fma2(high & 0x000f000fu, Act::kFromBit0, Act::kMinusEight);
    a[3] = Act::fma2(high & 0x00f000f0u, Act::kFromBit4, Act::kMinusEight);
}

template <class Act>
LQ_DEVICE void unpack(Table<Act>, const Vec4& table, u32 word, u32 (&a)[4]) {
    u32 found[2];
    // Codes 0, 1, 4, 5, then 2, 3, 6, 7: so each pair is two bytes apart.
    look_up(table, permute(word, word, 0x3120u), found);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[i] = Act::fma2(found[i] & 0x00ff00ffu, Act::kFromBit0, Act::kMinusZero);
        a[i + 2] = Act::fma2(found[i] >> 8 & 0x00ff00ffu, Act::kFromBit0, Act::kMinusZero);
    }
}

struct Arguments {
    const void* x;             // [m, k_end - k_begin] activations, row stride x_stride elements
    const void* weights;       // [n/16, k_tiles, 128] words
    const void* scales;        // [scale_rows, n]
    void* out;                 // [m, n], row stride out_stride elements
    const void* bias;          // [n] float32, or null
    const void* addend;        // [m, n] float32, row stride addend_stride, or null
    void* partials;            // [slices, units, 256 * kMt] float32, unused with one slice
    void* counters;            // [units] u32, zero before and after, unused with one slice
    int m, n, k_tiles, k_begin, k_end;
    int x_stride, out_stride, addend_stride;
    int group_shift, scale_rows, flags;
    Vec4 table;                // of levels, unused with even ones
};

LQ_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

template <class Act, class Scale, int kMt>
struct PairOfStrips {
    static constexpr int kFragmentBytes = 2 * kMt * 32 * 16;  // a unit, float32

    typedef float Sums[2][kMt][4];  // [strip][token tile][fragment]

    const Arguments& p;
    int lane;
    int units;        // of the whole product
    int first_unit;   // that of pair 0 for this warp's tokens
    int first_token;  // of this warp

    // ---- products ---------------------------------------------------------------------------------------------------

    // A lane's scales of a group: fragment elements 0, 1 belong to column lane/4, elements 2, 3 to column lane/4 + 8.
    struct Scales {
        float low[2], high[2];  // [strip]
    };

    LQ_DEVICE_METHOD Scales scales_at(u32 row_address) const {
        Scales found;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            found.low[i] = Scale::load(row_address, i * 16 + lane / 4);
            found.high[i] = Scale::load(row_address, i * 16 + lane / 4 + 8);
        }
        return found;
    }

    // sums += scale * part of one token tile; with kClear part = 0, for groups that do not begin with a product that
    // overwrites it (multiply).
    template <bool kClear>
    LQ_DEVICE_METHOD void fold_tile(const Scales& scales, int t, Sums& part, Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                sums[i][t][r] = fma_rn(r < 2 ? scales.low[i] : scales.high[i], part[i][t][r], sums[i][t][r]);
                if (kClear) part[i][t][r] = 0.0f;
            }
        }
    }

    template <bool kClear>
    LQ_DEVICE_METHOD void fold(const Scales& scales, Sums& part, Sums& sums) const {
#pragma unroll
        for (int t = 0; t < kMt; ++t) fold_tile<kClear>(scales, t, part, sums);
    }

    typedef u32 Operands[2][2][4];  // weights of 32 rows: [k16 step][strip]

    LQ_DEVICE_METHOD void unpack_half_tile(const u32 (&words)[2][4], int half, Operands& a) const {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) unpack(Act{}, p.table, words[i][2 * half + j], a[j][i]);
    }

    // part += products of 32 rows with one token tile; `fresh`, known when compiled, says that a group begins here and part
    // is overwritten.
    LQ_DEVICE_METHOD void multiply(const Operands& a, int t, bool fresh, u32 x_row, Sums& part) const {
        u32 b[4];
        load_matrix4(b, x_row);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (fresh && j == 0) {
                    Act::mma_new(part[i][t], a[j][i], b[2 * j], b[2 * j + 1]);
                } else {
                    Act::mma(part[i][t], a[j][i], b[2 * j], b[2 * j + 1]);
                }
            }
    }

    // ---- sums on their way out --------------------------------------------------------------------------------------

    LQ_DEVICE_METHOD void clear(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < kMt; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r) sums[i][t][r] = 0.0f;
    }

    // From sums over codes / kUnit to sums over codes: the factor is a power of two, so the product is exact.
    LQ_DEVICE_METHOD void to_units(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < kMt; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r) sums[i][t][r] *= Act::kUnit;
    }

    LQ_DEVICE_METHOD char* partial(int slice, int pair) const {
        return (char*)p.partials + ((long long)slice * units + first_unit + pair) * kFragmentBytes + lane * 16;
    }

    LQ_DEVICE_METHOD static Vec4 pack(const float (&v)[4]) {
        return Vec4{float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]), float_to_bits(v[3])};
    }

    LQ_DEVICE_METHOD static void add(Vec4 v, float (&sum)[4]) {
        sum[0] += bits_to_float(v.x), sum[1] += bits_to_float(v.y);
        sum[2] += bits_to_float(v.z), sum[3] += bits_to_float(v.w);
    }

    // All of the slice is in `sums`: to the output if the slice is all of K, else to the workspace.
    LQ_DEVICE_METHOD void finish_slice(int pair, const Sums& sums) const {
        if (grid_y() == 1) {
            store(pair, sums);
            return;
        }
        char* to = partial(block_y(), pair);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < kMt; ++t) st_global4(to + (i * kMt + t) * 512, pack(sums[i][t]));
    }

    LQ_DEVICE_METHOD void store(int pair, const Sums& sums) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int r = 0; r < 4; r += 2) {
                const int column = pair * kPairColumns + i * 16 + lane / 4 + r * 4;
                if (column >= p.n) continue;
                const float bias = p.bias ? bits_to_float(ld_global1((const float*)p.bias + column)) : 0.0f;
#pragma unroll
                for (int t = 0; t < kMt; ++t) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int token = first_token + t * 8 + (lane % 4) * 2 + c;
                        if (token < p.m) store_one(token, column, sums[i][t][r + c] + bias);
                    }
                }
            }
        }
    }

    LQ_DEVICE_METHOD void store_one(int token, int column, float value) const {
        if (p.addend) {
            value += bits_to_float(ld_global1((const float*)p.addend + (long long)token * p.addend_stride + column));
        }
        const long long at = (long long)token * p.out_stride + column;
        if (p.flags & kOutFloat32) {
            st_global1((float*)p.out + at, float_to_bits(value));
        } else {
            st_global_half((u16*)p.out + at, Act::round(value));
        }
    }

    // Adds slices [first, first + kAhead) of a pair, in order. All are loaded before the first is added: one after the
    // other, each would wait for the L2. Beyond the last slice the last is loaded again and not added.
    static constexpr int kAhead = kMt == 1 ? 8 : kMt == 2 ? 6 : kMt == 4 ? 4 : 1;

    LQ_DEVICE_METHOD void add_slices(int first, int pair, Sums& sums) const {
        Vec4 v[kAhead][2][kMt];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const char* from = partial(smaller(first + a, grid_y() - 1), pair);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int t = 0; t < kMt; ++t) v[a][i][t] = ld_global4_l2(from + (i * kMt + t) * 512);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            if (first + a >= grid_y()) break;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int t = 0; t < kMt; ++t) add(v[a][i][t], sums[i][t]);
        }
    }

    // To the output, all slices of a pair in order.
    LQ_DEVICE_METHOD void join_slices_of(int pair) const {
        Sums sums;
        clear(sums);
        for (int slice = 0; slice < grid_y(); slice += kAhead) add_slices(slice, pair, sums);
        store(pair, sums);
    }
};

}  // namespace loopq

#endif  // LOOPQ_W4A16_CUH
