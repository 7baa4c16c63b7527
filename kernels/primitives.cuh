// Everything in loopq's kernels that is not plain C++: thread indices, memory accesses and PTX instructions.
//
// A kernel file uses only the names below, takes shared memory as 32-bit addresses and never dereferences a
// pointer itself. Two things follow. The source needs no CUDA header, so NVRTC compiles it anywhere. A host
// program can replace this file by its own definitions (same include guard) and run the unchanged kernel on a
// CPU with every access checked (tests/support/cuda/host).
//
// Loads and copies are `volatile` so that the front end keeps them on their side of the waits and barriers; the
// arithmetic is not, so that the compiler may schedule it.

#ifndef LOOPQ_PRIMITIVES_CUH
#define LOOPQ_PRIMITIVES_CUH

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

#define LQ_DEVICE static __device__ __forceinline__
#define LQ_DEVICE_MEMBER static __device__ __forceinline__
#define LQ_DEVICE_METHOD __device__ __forceinline__
#define LQ_KERNEL extern "C" __global__

// ---- where am I -----------------------------------------------------------------------------------------------

LQ_DEVICE int thread_index() { return (int)threadIdx.x; }
LQ_DEVICE int thread_count() { return (int)blockDim.x; }
LQ_DEVICE int block_x() { return (int)blockIdx.x; }
LQ_DEVICE int block_y() { return (int)blockIdx.y; }
LQ_DEVICE int grid_x() { return (int)gridDim.x; }
LQ_DEVICE int grid_y() { return (int)gridDim.y; }

// Read anew: what was worked out from them earlier need not have stayed in registers.
LQ_DEVICE int thread_index_anew() {
    int v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}
LQ_DEVICE int block_x_anew() {
    int v;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
    return v;
}

// ---- shared memory ----------------------------------------------------------------------------------------------

// Address of the block's dynamic shared memory (16-byte aligned) in the shared window.
LQ_DEVICE u32 shared_base() {
    extern __shared__ Vec4 lq_dynamic_shared[];
    return (u32)__cvta_generic_to_shared(lq_dynamic_shared);
}

LQ_DEVICE Vec4 ld_shared4(u32 address) {
    Vec4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

LQ_DEVICE u32 ld_shared1(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

LQ_DEVICE u16 ld_shared_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

LQ_DEVICE double ld_shared_double(u32 address) {
    double v;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v) : "r"(address) : "memory");
    return v;
}

LQ_DEVICE void st_shared_double(u32 address, double v) {
    asm volatile("st.shared.f64 [%0], %1;" :: "r"(address), "d"(v) : "memory");
}

LQ_DEVICE void st_shared4(u32 address, Vec4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

LQ_DEVICE void st_shared1(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(v) : "memory");
}

// ---- global memory ----------------------------------------------------------------------------------------------

LQ_DEVICE Vec4 ld_global4(const void* p) {
    Vec4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

LQ_DEVICE u32 ld_global1(const void* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

LQ_DEVICE double ld_global_double(const void* p) {
    double v;
    asm volatile("ld.global.f64 %0, [%1];" : "=d"(v) : "l"(p) : "memory");
    return v;
}

LQ_DEVICE void st_global_double(void* p, double v) {
    asm volatile("st.global.f64 [%0], %1;" :: "l"(p), "d"(v) : "memory");
}

LQ_DEVICE u16 ld_global_half(const void* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}

// Past L1, which is not coherent: for data that another block wrote during this launch.
LQ_DEVICE Vec4 ld_global4_l2(const void* p) {
    Vec4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

LQ_DEVICE void st_global4(void* p, Vec4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

LQ_DEVICE void st_global2(void* p, u32 x, u32 y) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" :: "l"(p), "r"(x), "r"(y) : "memory");
}

LQ_DEVICE void st_global1(void* p, u32 v) {
    asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}

LQ_DEVICE void st_global_half(void* p, u16 v) {
    asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"(v) : "memory");
}

LQ_DEVICE u32 atomic_add(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

// ---- order ------------------------------------------------------------------------------------------------------

LQ_DEVICE void block_sync() { asm volatile("bar.sync 0;" ::: "memory"); }
LQ_DEVICE void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
LQ_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Programmatic dependent launch. Both do nothing in an ordinary launch.
LQ_DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

LQ_DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- asynchronous copies, sm_80: 16 bytes per thread ------------------------------------------------------------

// How the L2 treats a stream that is read once: it makes room first (true), or treats the stream like any
// other.
LQ_DEVICE u64 l2_policy(bool evict_first) {
    u64 policy;
    if (evict_first) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

LQ_DEVICE void copy_async16(u32 to, const void* from, u64 policy) {
    asm volatile("{ .reg .u64 g; cvta.to.global.u64 g, %1;"
                 " cp.async.cg.shared.global.L2::cache_hint [%0], [g], 16, %2; }"
                 :: "r"(to), "l"(from), "l"(policy) : "memory");
}

LQ_DEVICE void copy_async16(u32 to, const void* from) {
    asm volatile("{ .reg .u64 g; cvta.to.global.u64 g, %1; cp.async.cg.shared.global [%0], [g], 16; }"
                 :: "r"(to), "l"(from) : "memory");
}

LQ_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's most recent groups are still under way.
template <int Pending>
LQ_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// ---- tensor cores -----------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.
LQ_DEVICE void load_matrix4(u32 (&r)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row_address) : "memory");
}

// c += a b with a 16x16 (row), b 16x8 (column), c 16x8 float32.
LQ_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

LQ_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = a b.
LQ_DEVICE void mma_bf16_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

LQ_DEVICE void mma_f16_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// ---- arithmetic -------------------------------------------------------------------------------------------------

LQ_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

LQ_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Each of the four lowest nibbles of the selector chooses one of the eight bytes of a and b; its highest bit is zero.
LQ_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

LQ_DEVICE float bits_to_float(u32 v) { return __uint_as_float(v); }
LQ_DEVICE u32 float_to_bits(float v) { return __float_as_uint(v); }

LQ_DEVICE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }

LQ_DEVICE float f16_to_float(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}

LQ_DEVICE u16 float_to_bf16(float v) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

LQ_DEVICE u16 float_to_f16(float v) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

// Correctly rounded, so that a host run gives the same bits.
LQ_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LQ_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
LQ_DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
LQ_DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
LQ_DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
LQ_DEVICE float round_even(float a) { return rintf(a); }
LQ_DEVICE double round_even(double a) { return rint(a); }
LQ_DEVICE float exp_approx(float a) { return expf(a); }

// ---- across a warp ----------------------------------------------------------------------------------------------

LQ_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
LQ_DEVICE u32 shuffle_xor(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
LQ_DEVICE u32 shuffle_from(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

#endif  // LOOPQ_PRIMITIVES_CUH
