// What the published EXL3 kernel needs of CUDA, for the processor: a block is one thread, and a half is a float that holds
// a half's value. The block then has its tile in shared memory before it starts, which `quantize_tiles` sees to.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define NUM_THREADS 1
#define H_INF __ushort_as_half(0x7c00)
#define H_INF_F INFINITY

struct half {
    float value;
};
using __half = half;
struct half2 {
    half low, high;
};

// To the nearest half, ties to even; without branches, so that a compiler makes vectors of it.
static inline float rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu;
    float normal;
    std::memcpy(&normal, &bits, 4);
    const float size = std::fabs(x);
    const float subnormal = std::copysign((size + 0.5f) - 0.5f, x);
    const float finite = size < 6.103515625e-05f ? subnormal : normal;
    return size >= 65520.0f ? std::copysign(INFINITY, x) : finite;
}

static inline half __ushort_as_half(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return {bits >> 15 ? -size : size};
}

static inline float __half2float(half x) { return x.value; }
static inline half __float2half(float x) { return {rounded(x)}; }
static inline half __float2half_rn(float x) { return {rounded(x)}; }
static inline half __hadd(half a, half b) { return {rounded(a.value + b.value)}; }
static inline half __low2half(half2 x) { return x.low; }
static inline half __high2half(half2 x) { return x.high; }
static inline bool __hlt(half a, half b) { return a.value < b.value; }

// The codebook "mul1" alone needs these, and the quantizer's default is "mcg".
half __hfma(half, half, half);
half2 __hfma2(half2, half2, half2);
half2 __hadd2(half2, half2);
half2 __lows2half2(half2, half2);
half2 __highs2half2(half2, half2);
half2 __half2half2(half);
half2 __halves2half2(half, half);

struct half2_uint32 {
    half2 as_half2;
    explicit half2_uint32(uint32_t x)
        : as_half2{__ushort_as_half(uint16_t(x)), __ushort_as_half(uint16_t(x >> 16))} {}
};
struct half_uint16 {
    half as_half;
    explicit half_uint16(uint16_t x) : as_half(__ushort_as_half(x)) {}
};

struct Index {
    int x = 0;
};
static const Index blockIdx, threadIdx;
static inline unsigned __activemask() { return 1; }
template <class T> static inline T __shfl_down_sync(unsigned, T mine, int, int) { return mine; }
static inline void __syncthreads() {}

// Shared memory of a block: the tile comes first.
static std::vector<uint8_t> shared_memory(1 << 20);
