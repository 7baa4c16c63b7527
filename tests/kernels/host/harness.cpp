// Runs the unchanged kernel sources on the host. Built by tests/kernels/emulate.py with g++, called through ctypes.

#include "primitives_host.hpp"

#include "../../../kernels/fused_ops.cu"
#include "../../../kernels/w4_dequantize.cu"
#include "../../../kernels/w4a16_gemm.cu"

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

template <class Act, int kMt, int kFold, int kStages, bool kBulk>
void gemm_body(const loopq::Arguments* arguments) {
    loopq::Gemm<Act, kMt, kFold, kStages, kBulk> gemm(*arguments);
    gemm.run();
}

typedef void (*GemmBody)(const loopq::Arguments*);

#ifdef LQ_HOST_ONE_VARIANT  // for tests that build many altered kernels
GemmBody pick(const int*) { return gemm_body<loopq::Bf16, 1, 2, 4, false>; }
#else

template <class Act, int kMt, int kFold>
GemmBody pick_copy(int stages, int bulk) {
    if (stages == 4) return bulk ? gemm_body<Act, kMt, kFold, 4, true> : gemm_body<Act, kMt, kFold, 4, false>;
    if (stages == 2 && kMt == 1 && !bulk) return gemm_body<Act, 1, kFold, 2, false>;
    if (stages == 3 && kMt == 2) return bulk ? gemm_body<Act, 2, kFold, 3, true> : gemm_body<Act, 2, kFold, 3, false>;
    return nullptr;
}

template <class Act, int kMt>
GemmBody pick_fold(int fold, int stages, int bulk) {
    if (fold == 0) return pick_copy<Act, kMt, 0>(stages, bulk);
    if (fold == 1) return pick_copy<Act, kMt, 1>(stages, bulk);
    return fold == 2 ? pick_copy<Act, kMt, 2>(stages, bulk) : nullptr;
}

template <class Act>
GemmBody pick_tokens(int token_tiles, int fold, int stages, int bulk) {
    if (token_tiles == 1) return pick_fold<Act, 1>(fold, stages, bulk);
    if (token_tiles == 2) return pick_fold<Act, 2>(fold, stages, bulk);
    return token_tiles == 4 ? pick_fold<Act, 4>(fold, stages, bulk) : nullptr;
}

GemmBody pick(const int* variant) {
    return variant[0] ? pick_tokens<loopq::Fp16>(variant[1], variant[2], variant[3], variant[4])
                      : pick_tokens<loopq::Bf16>(variant[1], variant[2], variant[3], variant[4]);
}

#endif

}  // namespace

extern "C" {

const char* emulator_error() { return last_error.c_str(); }

void emulator_forget_memory() { host::vm().regions.clear(); }

void emulator_register(void* p, size_t bytes, int writable, const char* name) {
    host::vm().regions.push_back({(uintptr_t)p, (uintptr_t)p + bytes, writable != 0, name});
}

// `variant`: activation (0 bf16, 1 fp16), token tiles, fold, stages, bulk. `launch_shape`: grid x, grid y, threads, shared bytes.
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
    return launch((int)launch_shape[0], (int)launch_shape[1], (int)launch_shape[2], (size_t)launch_shape[3], seed,
                  [body, &a] { body(&a); });
}

// `shape`: grid x, grid y, threads, shared bytes; `half`: float16 instead of bfloat16.
int emulate_add_norm(int half, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float epsilon) {
    const loopq::NormArguments a = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], pointers[5],
                                    scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], epsilon};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [half, &a] {
        half ? loopq::AddNorm<loopq::Fp16Io>::run(a) : loopq::AddNorm<loopq::Bf16Io>::run(a);
    });
}

int emulate_rope_attention(int half, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float scale) {
    const loopq::AttentionArguments a = {pointers[0], pointers[1], pointers[2], pointers[3],
                                         scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scale};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [half, &a] {
        half ? loopq::Attention<loopq::Fp16Io>::run(a) : loopq::Attention<loopq::Bf16Io>::run(a);
    });
}

int emulate_swiglu(int half, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float) {
    const loopq::SwigluArguments a = {pointers[0], pointers[1], scalars[0], scalars[1], scalars[2], scalars[3]};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [half, &a] {
        half ? loopq::swiglu<loopq::Fp16Io>(a) : loopq::swiglu<loopq::Bf16Io>(a);
    });
}

int emulate_w4_dequantize(int half, const long long* shape, u64 seed, void* const* pointers, const int* scalars, float) {
    const loopq::DequantizeArguments a = {pointers[0], pointers[1], pointers[2], scalars[0], scalars[1],
                                          scalars[2], scalars[3], scalars[4], scalars[5]};
    return launch((int)shape[0], (int)shape[1], (int)shape[2], (size_t)shape[3], seed, [half, &a] {
        half ? loopq::Dequantize<true>::run(a) : loopq::Dequantize<false>::run(a);
    });
}

}  // extern "C"
