// Runs the unchanged kernel sources on the host. Built by tests/support/cuda/emulation.py with g++, called through ctypes.

#include "primitives_host.hpp"

#include "../../../../kernels/beam.cu"
#include "../../../../kernels/descent.cu"
#include "../../../../kernels/w4_dequantize.cu"
#include "../../../../kernels/w4a16_gemm.cu"
#include "../../../../kernels/w4a16_tiled.cu"

namespace {

std::string last_error;

// Runs every block of a launch, in seeded order. Returns 0, or 1 with the message in last_error.
int launch(int blocks_x, int blocks_y, int threads, size_t shared_bytes, u64 seed, std::function<void()> body) {
    host::Machine& m = host::vm();
    std::mt19937_64 order(seed);
    std::vector<int> blocks((size_t)(blocks_x * blocks_y));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = (int)i;
    std::shuffle(blocks.begin(), blocks.end(), order);
    m.grid[0] = blocks_x, m.grid[1] = blocks_y;
    m.body = std::move(body);
    m.error.clear();
    for (int b : blocks) {
        m.run_block(b % blocks_x, b / blocks_x, threads, shared_bytes, order);
        if (!m.error.empty()) {
            last_error = m.error;
            return 1;
        }
    }
    return 0;
}

template <class Act, class Scale, int kMt, int kFold, int kStages>
void gemm_body(const loopq::Arguments* arguments) {
    loopq::Gemm<Act, Scale, kMt, kFold, kStages> gemm(*arguments);
    gemm.run();
}

template <class Act, class Scale, int kTokenWarps, int kFold, int kStages>
void tiled_body(const loopq::Arguments* arguments) {
    loopq::Tiled<Act, Scale, kTokenWarps, kFold, kStages> tiled(*arguments);
    tiled.run();
}

typedef void (*GemmBody)(const loopq::Arguments*);

struct Row {
    int variant[5];
    GemmBody body;
};

#ifdef LQ_HOST_ONE_VARIANT  // for tests that build many altered kernels
GemmBody pick(const int* variant) {
    if (variant[1] > 4) return tiled_body<loopq::Bf16, loopq::ScaleF32, 1, 2, 4>;
    return gemm_body<loopq::Bf16, loopq::ScaleF32, 1, 3, 4>;
}
#elif LQ_HOST_TOKENS > 4  // the tiled product: token tiles per block

#define LQ_ROW(half, Act, warps, fold, stages, scales, Scale) \
    {{half, 8 * warps, fold, stages, scales}, tiled_body<loopq::Act, loopq::Scale, warps, fold, stages>}
#define LQ_WARPS(half, Act, fold, stages, scales, Scale) \
    LQ_ROW(half, Act, 1, fold, stages, scales, Scale), LQ_ROW(half, Act, 2, fold, stages, scales, Scale)

const Row kRows[] = {
    LQ_WARPS(0, Bf16, 0, 4, 0, ScaleF32), LQ_WARPS(0, Bf16, 1, 4, 0, ScaleF32), LQ_WARPS(0, Bf16, 2, 4, 0, ScaleF32),
    LQ_WARPS(0, Bf16, 0, 4, 1, ScaleBf16), LQ_WARPS(0, Bf16, 1, 4, 1, ScaleBf16), LQ_WARPS(0, Bf16, 2, 4, 1, ScaleBf16),
    LQ_WARPS(0, Bf16, 2, 2, 0, ScaleF32), LQ_WARPS(0, Bf16, 2, 3, 0, ScaleF32), LQ_WARPS(0, Bf16, 0, 3, 2, ScaleFp16),
    LQ_WARPS(1, Fp16, 2, 4, 0, ScaleF32), LQ_WARPS(1, Fp16, 0, 4, 2, ScaleFp16),
    LQ_WARPS(2, TableBf16, 0, 4, 1, ScaleBf16), LQ_WARPS(2, TableBf16, 2, 4, 0, ScaleF32),
    LQ_WARPS(3, TableFp16, 1, 4, 2, ScaleFp16),
};

#else

#define LQ_ROW(half, Act, tokens, fold, stages, scales, Scale) \
    {{half, tokens, fold, stages, scales}, gemm_body<loopq::Act, loopq::Scale, tokens, fold, stages>}
#define LQ_FOLDS(tokens) \
    LQ_ROW(0, Bf16, tokens, 0, 4, 0, ScaleF32), LQ_ROW(0, Bf16, tokens, 1, 4, 0, ScaleF32), LQ_ROW(0, Bf16, tokens, 2, 4, 0, ScaleF32), \
    LQ_ROW(0, Bf16, tokens, 3, 4, 0, ScaleF32)
#define LQ_RING(tokens, stages) \
    LQ_ROW(0, Bf16, tokens, 0, stages, 0, ScaleF32), LQ_ROW(0, Bf16, tokens, 1, stages, 0, ScaleF32), \
    LQ_ROW(0, Bf16, tokens, 2, stages, 0, ScaleF32), LQ_ROW(0, Bf16, tokens, 3, stages, 0, ScaleF32)
#define LQ_TYPES(half, Act, scales, Scale) LQ_ROW(half, Act, 1, 0, 4, scales, Scale), LQ_ROW(half, Act, 1, 3, 4, scales, Scale)

// Everything for bf16 with float32 scales; what other rings and types add, once each. One library holds the variants of
// one number of token tiles: a third of the compiler's time, spent when it is first needed.
const Row kRows[] = {
    LQ_FOLDS(LQ_HOST_TOKENS),
    LQ_ROW(2, TableBf16, LQ_HOST_TOKENS, 0, 4, 1, ScaleBf16), LQ_ROW(2, TableBf16, LQ_HOST_TOKENS, 3, 4, 0, ScaleF32),
    LQ_ROW(3, TableFp16, LQ_HOST_TOKENS, 1, 4, 2, ScaleFp16), LQ_ROW(3, TableFp16, LQ_HOST_TOKENS, 2, 4, 0, ScaleF32),
#if LQ_HOST_TOKENS == 1
    LQ_RING(1, 2),
    LQ_TYPES(0, Bf16, 1, ScaleBf16), LQ_TYPES(0, Bf16, 2, ScaleFp16),
    LQ_ROW(0, Bf16, 1, 1, 4, 1, ScaleBf16), LQ_ROW(0, Bf16, 1, 2, 4, 1, ScaleBf16),
    LQ_TYPES(1, Fp16, 0, ScaleF32), LQ_TYPES(1, Fp16, 1, ScaleBf16), LQ_TYPES(1, Fp16, 2, ScaleFp16),
#else
#if LQ_HOST_TOKENS == 2
    LQ_RING(2, 3),
#endif
    LQ_ROW(0, Bf16, LQ_HOST_TOKENS, 0, 4, 1, ScaleBf16), LQ_ROW(0, Bf16, LQ_HOST_TOKENS, 1, 4, 1, ScaleBf16),
    LQ_ROW(0, Bf16, LQ_HOST_TOKENS, 2, 4, 1, ScaleBf16), LQ_ROW(0, Bf16, LQ_HOST_TOKENS, 3, 4, 1, ScaleBf16),
    LQ_ROW(1, Fp16, LQ_HOST_TOKENS, 3, 4, 0, ScaleF32),
#endif
};

#endif

#ifndef LQ_HOST_ONE_VARIANT
GemmBody pick(const int* variant) {
    for (const Row& row : kRows) {
        if (std::equal(row.variant, row.variant + 5, variant)) return row.body;
    }
    return nullptr;
}
#endif

}  // namespace

extern "C" {

const char* emulator_error() { return last_error.c_str(); }

void emulator_forget_memory() { host::vm().regions.clear(); }

void emulator_register(void* p, size_t bytes, int writable, const char* name) {
    host::vm().regions.push_back({(uintptr_t)p, (uintptr_t)p + bytes, writable != 0, name});
}

// `variant`: activation (0 bf16, 1 fp16; with a table 2 and 3), token tiles (of a block, from 8 on of the tiled product), fold, stages, scales (0 f32, 1 bf16, 2 fp16). `launch_shape`: grid x, grid y, threads, shared bytes.
int emulate_w4a16_gemm(const int* variant, const long long* launch_shape, u64 seed, void* const* pointers, const int* scalars) {
    const GemmBody body = pick(variant);
    if (!body) {
        last_error = "this variant is not built into the emulation";
        return 1;
    }
    loopq::Arguments a;
    a.x = pointers[0], a.weights = pointers[1], a.scales = pointers[2], a.out = pointers[3];
    a.bias = pointers[4], a.addend = pointers[5], a.partials = pointers[6], a.counters = pointers[7];
    a.m = scalars[0], a.n = scalars[1], a.k_tiles = scalars[2], a.k_begin = scalars[3], a.k_end = scalars[4];
    a.x_stride = scalars[5], a.out_stride = scalars[6], a.addend_stride = scalars[7];
    a.group_shift = scalars[8], a.scale_rows = scalars[9], a.flags = scalars[10];
    memcpy(&a.table, scalars + 11, 16);
    return launch((int)launch_shape[0], (int)launch_shape[1], (int)launch_shape[2], (size_t)launch_shape[3], seed,
                  [body, &a] { body(&a); });
}

// `shape`: grid x, grid y, threads, shared bytes; `half`: float16 instead of bfloat16, bit 1 for a table.
int emulate_w4_dequantize(int half, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float) {
    loopq::DequantizeArguments a = {pointers[0], pointers[1], pointers[2], scalars[0], scalars[1],
                                    scalars[2], scalars[3], scalars[4], scalars[5], {}};
    memcpy(&a.table, scalars + 6, 16);
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [half, &a] {
        if (half & 2) {
            half & 1 ? loopq::Dequantize<true, true>::run(a) : loopq::Dequantize<false, true>::run(a);
        } else {
            half & 1 ? loopq::Dequantize<true, false>::run(a) : loopq::Dequantize<false, false>::run(a);
        }
    });
}

// `paths`: open paths of a row.
int emulate_beam(int paths, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float) {
    const loopq::BeamArguments a = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], pointers[5], pointers[6],
                                    pointers[7], pointers[8], pointers[9], scalars[0], scalars[1], scalars[2]};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [paths, &a] {
        paths == 64   ? loopq::Beam<64>::start(a)
        : paths == 16 ? loopq::Beam<16>::start(a)
        : paths == 8  ? loopq::Beam<8>::start(a)
                      : loopq::Beam<2>::start(a);
    });
}

// `codes`: of codes, else of scales.
int emulate_descent(int codes, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float) {
    const loopq::DescentArguments a = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], pointers[5],
                                       pointers[6], pointers[7], pointers[8], pointers[9], pointers[10], pointers[11],
                                       scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed,
                  [codes, &a] { loopq::Descent::start(a, codes != 0); });
}

}  // extern "C"
