// Host twin of kernels/primitives.cuh: the same names, so that an unchanged kernel file compiles as C++ and runs on
// a CPU. Stricter than hardware:
//   * every shared or global access is checked for bounds, alignment and direction;
//   * shared memory starts out uninitialised and reading an unwritten byte is an error;
//   * asynchronous copies land only at the wait that covers them, and their target is unreadable until then;
//   * a thread may read another thread's writes to shared memory only after a barrier that both have passed. It may
//     overwrite data that another thread has read only after one. Tensor-core instructions and shuffles bring a warp
//     together but are no barriers for memory, neither here nor by the rules of PTX;
//   * threads are fibers that run in a seeded random order between synchronisation points;
//   * warp-wide instructions need all 32 lanes at the same instruction, barriers need every live thread.
// It does not model tensor-core rounding (products of a step are summed in double and rounded once), memory order
// between blocks (blocks run one after another, in seeded order), or speed.

#ifndef LOOPQ_PRIMITIVES_CUH
#define LOOPQ_PRIMITIVES_CUH

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ucontext.h>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

#define LQ_DEVICE [[maybe_unused]] static inline
#define LQ_DEVICE_MEMBER static inline
#define LQ_DEVICE_METHOD inline
#define LQ_KERNEL

namespace host {

struct Region {
    uintptr_t begin, end;
    bool writable;
    std::string name;
};

struct PendingCopy {
    u32 to;
    const char* from;
    u32 bytes;
};

enum class Op : int { None, WarpSync, LoadMatrix, MmaBf16, MmaF16, ShuffleXor, ShuffleFrom };

// Input and output of a lane in a warp-wide instruction.
struct Slot {
    Op op = Op::None;
    u32 in[7];
    float c[4];
    u32 out[4];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false, at_block_barrier = false, at_warp = false;
    u32 warp_epoch = 0, block_epoch = 0;  // barriers passed
    Slot slot;
    std::vector<std::vector<PendingCopy>> groups;
    std::vector<PendingCopy> open_group;
};

// When a thread last touched a word of shared memory, in barriers that it had passed.
struct Touch {
    int thread = -1;
    u32 warp_epoch = 0, block_epoch = 0;
};

struct Machine {
    std::vector<Region> regions;
    std::vector<Fiber> fibers;
    ucontext_t scheduler;
    std::vector<char> shared;
    std::vector<char> written;  // per byte: holds a value
    std::vector<Touch> writers, readers;  // per word
    std::function<void()> body;
    int current = -1, threads = 0;
    int block[2] = {0, 0}, grid[2] = {1, 1};
    std::string error;

    static Machine& get() {
        static Machine machine;
        return machine;
    }

    Fiber& self() { return fibers[(size_t)current]; }

    [[noreturn]] void fail(const std::string& what) {
        if (error.empty()) {
            error = "block (" + std::to_string(block[0]) + ", " + std::to_string(block[1]) + ") thread "
                    + std::to_string(current) + ": " + what;
        }
        setcontext(&scheduler);
        abort();
    }

    void yield() { swapcontext(&self().context, &scheduler); }

    char* global(const void* p, size_t bytes, bool write) {
        const uintptr_t at = (uintptr_t)p;
        if (at % bytes != 0) fail("global access of " + std::to_string(bytes) + " bytes is not aligned");
        for (const Region& r : regions) {
            if (at >= r.begin && at + bytes <= r.end) {
                if (write && !r.writable) fail("write to read-only " + r.name);
                return (char*)at;
            }
        }
        std::string near = "no registered array";
        for (const Region& r : regions) {
            if (at + 65536 >= r.begin && at < r.end + 65536) {
                near = r.name + " at byte " + std::to_string((long long)(at - r.begin)) + " of "
                       + std::to_string(r.end - r.begin);
            }
        }
        fail(std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes outside memory: " + near);
    }

    size_t shared_range(u32 address, u32 bytes, u32 alignment) {
        if (address % alignment != 0) fail("shared address " + std::to_string(address) + " is not aligned");
        const size_t at = address - kBase;
        if (address < kBase || at + bytes > shared.size()) {
            fail("shared access at byte " + std::to_string((long long)address - kBase) + " of " + std::to_string(shared.size()));
        }
        return at;
    }

    // Whether what `before` did is ordered before what thread `now` does.
    bool ordered(const Touch& before, int now) {
        if (before.thread < 0 || before.thread == now) return true;
        const Fiber& f = fibers[(size_t)now];
        if (f.block_epoch > before.block_epoch) return true;
        return before.thread / 32 == now / 32 && f.warp_epoch > before.warp_epoch;
    }

    Touch touch(int thread) {
        const Fiber& f = fibers[(size_t)thread];
        return {thread, f.warp_epoch, f.block_epoch};
    }

    void read_shared(void* to, u32 address, u32 bytes, int thread) {
        const size_t at = shared_range(address, bytes, bytes);
        for (size_t word = at / 4; word <= (at + bytes - 1) / 4; ++word) {
            if (!ordered(writers[word], thread)) {
                fail("read of shared byte " + std::to_string(word * 4) + " that thread "
                     + std::to_string(writers[word].thread) + " wrote, with no barrier between");
            }
            readers[word] = touch(thread);
        }
        for (u32 i = 0; i < bytes; ++i) {
            if (!written[at + i]) fail("read of unwritten or in-flight shared byte " + std::to_string(at + i));
        }
        memcpy(to, &shared[at], bytes);
    }

    void claim_for_writing(size_t at, u32 bytes) {
        for (size_t word = at / 4; word < (at + bytes) / 4; ++word) {
            if (!ordered(readers[word], current) || !ordered(writers[word], current)) {
                fail("write to shared byte " + std::to_string(word * 4) + " that another thread uses, with no barrier "
                     "between");
            }
            writers[word] = touch(current);
        }
    }

    void write_shared(u32 address, const void* from, u32 bytes) {
        const size_t at = shared_range(address, bytes, bytes);
        claim_for_writing(at, bytes);
        memcpy(&shared[at], from, bytes);
        memset(&written[at], 1, bytes);
    }

    void start_copy(u32 to, u32 bytes) {
        const size_t at = shared_range(to, bytes, 16);
        claim_for_writing(at, bytes);
        memset(&shared[at], 0xff, bytes);
        memset(&written[at], 0, bytes);
    }

    void land(const PendingCopy& copy) {
        const size_t at = copy.to - kBase;
        memcpy(&shared[at], copy.from, copy.bytes);
        memset(&written[at], 1, copy.bytes);
    }

    // Blocks until all 32 lanes are at the same instruction; the last to come computes it for all.
    void warp_wide(Op op) {
        Fiber& me = self();
        me.slot.op = op;
        const int first = current / 32 * 32;
        me.at_warp = true;
        int here = 0;
        for (int i = first; i < first + 32; ++i) {
            const Fiber& f = fibers[(size_t)i];
            if (f.done) fail("warp-wide instruction after a lane of the warp has exited");
            if (f.at_warp) {
                ++here;
                if (f.slot.op != op) fail("lanes of one warp are at different warp-wide instructions");
            }
        }
        if (here < 32) {
            yield();
            return;
        }
        execute(op, &fibers[(size_t)first]);
        for (int i = first; i < first + 32; ++i) fibers[(size_t)i].at_warp = false;
    }

    void execute(Op op, Fiber* lanes);

    void start(int thread) {
        Fiber& f = fibers[(size_t)thread];
        f.done = f.at_block_barrier = f.at_warp = false;
        f.warp_epoch = f.block_epoch = 0;
        f.groups.clear();
        f.open_group.clear();
        constexpr size_t kStack = 96 * 1024;
        if (!f.stack) f.stack.reset(new char[kStack]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = kStack;
        f.context.uc_link = &scheduler;
        makecontext(&f.context, (void (*)())&Machine::enter, 0);
    }

    static void enter() {
        Machine& m = get();
        m.body();
        m.self().done = true;
        setcontext(&m.scheduler);
    }

    static bool runnable(const Fiber& f) { return !f.done && !f.at_block_barrier && !f.at_warp; }

    void run_block(int bx, int by, int thread_total, size_t shared_bytes, std::mt19937_64& order) {
        block[0] = bx, block[1] = by;
        threads = thread_total;
        fibers.resize((size_t)thread_total);
        shared.assign(shared_bytes, (char)0xff);
        written.assign(shared_bytes, 0);
        writers.assign(shared_bytes / 4 + 1, Touch());
        readers.assign(shared_bytes / 4 + 1, Touch());
        for (int i = 0; i < thread_total; ++i) start(i);
        std::vector<int> queue((size_t)thread_total);
        while (true) {
            queue.clear();
            int live = 0, at_barrier = 0;
            for (int i = 0; i < thread_total; ++i) {
                Fiber& f = fibers[(size_t)i];
                live += !f.done;
                at_barrier += f.at_block_barrier;
                if (runnable(f)) queue.push_back(i);
            }
            if (live == 0) return;
            if (queue.empty() && !release(live, at_barrier, thread_total)) return;
            std::shuffle(queue.begin(), queue.end(), order);
            for (int i : queue) {
                Fiber& f = fibers[(size_t)i];
                // A fiber may have run on (woken in a warp) or blocked since the queue was made.
                if (!runnable(f)) continue;
                current = i;
                swapcontext(&scheduler, &f.context);
                if (!error.empty()) return;
            }
        }
    }

    bool release(int live, int at_barrier, int thread_total) {
        if (at_barrier == live && live == thread_total) {
            for (Fiber& f : fibers) {
                f.at_block_barrier = false;
                ++f.block_epoch;
                ++f.warp_epoch;
            }
            return true;
        }
        if (at_barrier > 0 && live != thread_total) {
            error = "some threads wait at a block barrier after others have exited";
        } else {
            error = "deadlock: " + std::to_string(at_barrier) + " of " + std::to_string(live)
                    + " live threads at the block barrier, the others in a warp";
        }
        return false;
    }

    static constexpr u32 kBase = 1024;
};

inline Machine& vm() { return Machine::get(); }

inline float half_to_float(u16 h) {
    const u32 sign = (u32)(h & 0x8000u) << 16;
    const u32 exponent = (h >> 10) & 31, fraction = h & 1023;
    float magnitude;
    if (exponent == 31) {
        magnitude = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        magnitude = std::ldexp((float)fraction, -24);
    } else {
        magnitude = std::ldexp((float)(1024 + fraction), (int)exponent - 25);
    }
    return sign ? -magnitude : magnitude;
}

// Round to nearest even onto a grid of `digits` significant bits with least exponent `lowest`; what overflows is infinite.
inline double round_to(double v, int digits, int lowest, double largest) {
    if (v == 0 || std::isnan(v) || std::isinf(v)) return v;
    int exponent;
    std::frexp(v, &exponent);
    const int last = std::max(exponent - digits, lowest);
    const double r = std::ldexp(std::nearbyint(std::ldexp(v, -last)), last);
    return std::fabs(r) > largest ? std::copysign(INFINITY, v) : r;
}

inline u16 half_bits(double v) {
    const u16 sign = std::signbit(v) ? 0x8000 : 0;
    if (std::isnan(v)) return 0x7fff;
    const double r = std::fabs(round_to(v, 11, -24, 65504.0));
    if (std::isinf(r)) return sign | 0x7c00;
    if (r < std::ldexp(1.0, -14)) return sign | (u16)std::ldexp(r, 24);
    int exponent;
    const double fraction = std::frexp(r, &exponent);
    return sign | (u16)((exponent + 14) << 10) | (u16)(std::ldexp(fraction, 11) - 1024);
}

inline float bfloat_to_float(u16 h) {
    const u32 bits = (u32)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline u16 bfloat_bits(float v) {
    u32 bits;
    memcpy(&bits, &v, 4);
    if (std::isnan(v)) return 0x7fff;
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class ToFloat>
void matrix_multiply(Fiber* lanes, ToFloat to_float) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const u32* in = lanes[lane].slot.in;
        for (int i = 0; i < 2; ++i) {
            const int shift = 16 * i;
            a[row][column + i] = to_float((u16)(in[0] >> shift));
            a[row + 8][column + i] = to_float((u16)(in[1] >> shift));
            a[row][column + 8 + i] = to_float((u16)(in[2] >> shift));
            a[row + 8][column + 8 + i] = to_float((u16)(in[3] >> shift));
            b[column + i][row] = to_float((u16)(in[4] >> shift));
            b[column + 8 + i][row] = to_float((u16)(in[5] >> shift));
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int r = 0; r < 4; ++r) {
            const int row = lane / 4 + (r >= 2 ? 8 : 0), column = lane % 4 * 2 + (r & 1);
            double sum = lanes[lane].slot.c[r];
            for (int k = 0; k < 16; ++k) sum += (double)a[row][k] * b[k][column];
            lanes[lane].slot.c[r] = (float)sum;
        }
    }
}

inline void Machine::execute(Op op, Fiber* lanes) {
    if (op == Op::WarpSync) {
        for (int lane = 0; lane < 32; ++lane) ++lanes[lane].warp_epoch;
    } else if (op == Op::LoadMatrix) {
        for (int m = 0; m < 4; ++m) {
            u16 rows[8][8];
            for (int r = 0; r < 8; ++r) {
                read_shared(rows[r], lanes[m * 8 + r].slot.in[0], 16, current / 32 * 32 + m * 8 + r);
            }
            for (int lane = 0; lane < 32; ++lane) {
                lanes[lane].slot.out[m] = rows[lane / 4][lane % 4 * 2] | ((u32)rows[lane / 4][lane % 4 * 2 + 1] << 16);
            }
        }
    } else if (op == Op::MmaBf16) {
        matrix_multiply(lanes, bfloat_to_float);
    } else if (op == Op::MmaF16) {
        matrix_multiply(lanes, half_to_float);
    } else if (op == Op::ShuffleXor || op == Op::ShuffleFrom) {
        for (u32 lane = 0; lane < 32; ++lane) {
            const u32 from = op == Op::ShuffleXor ? lane ^ lanes[lane].slot.in[1] : lanes[lane].slot.in[1];
            lanes[lane].slot.out[0] = lanes[from & 31].slot.in[0];
        }
    }
}

template <class F>
u32 pairwise(u32 a, u32 b, u32 c, F f) {
    return f((u16)a, (u16)b, (u16)c) | ((u32)f((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16);
}

}  // namespace host

LQ_DEVICE int thread_index() { return host::vm().current; }
LQ_DEVICE int thread_count() { return host::vm().threads; }
LQ_DEVICE int block_x() { return host::vm().block[0]; }
LQ_DEVICE int block_y() { return host::vm().block[1]; }
LQ_DEVICE int grid_x() { return host::vm().grid[0]; }
LQ_DEVICE int grid_y() { return host::vm().grid[1]; }
LQ_DEVICE int thread_index_anew() { return thread_index(); }
LQ_DEVICE int block_x_anew() { return block_x(); }

LQ_DEVICE u32 shared_base() { return host::Machine::kBase; }

template <class T>
T host_ld_shared(u32 address) {
    T v;
    host::vm().read_shared(&v, address, sizeof(T), host::vm().current);
    return v;
}
LQ_DEVICE Vec4 ld_shared4(u32 address) { return host_ld_shared<Vec4>(address); }
LQ_DEVICE u32 ld_shared1(u32 address) { return host_ld_shared<u32>(address); }
LQ_DEVICE double ld_shared_double(u32 address) { return host_ld_shared<double>(address); }
LQ_DEVICE u16 ld_shared_half(u32 address) { return host_ld_shared<u16>(address); }
LQ_DEVICE void st_shared4(u32 address, Vec4 v) { host::vm().write_shared(address, &v, 16); }
LQ_DEVICE void st_shared_double(u32 address, double v) { host::vm().write_shared(address, &v, 8); }
LQ_DEVICE void st_shared1(u32 address, u32 v) { host::vm().write_shared(address, &v, 4); }

template <class T>
T host_ld_global(const void* p) {
    T v;
    memcpy(&v, host::vm().global(p, sizeof(T), false), sizeof(T));
    return v;
}
template <class T>
void host_st_global(void* p, T v) {
    memcpy(host::vm().global(p, sizeof(T), true), &v, sizeof(T));
}
LQ_DEVICE Vec4 ld_global4(const void* p) { return host_ld_global<Vec4>(p); }
LQ_DEVICE Vec4 ld_global4_l2(const void* p) { return host_ld_global<Vec4>(p); }
LQ_DEVICE u32 ld_global1(const void* p) { return host_ld_global<u32>(p); }
LQ_DEVICE double ld_global_double(const void* p) { return host_ld_global<double>(p); }
LQ_DEVICE u16 ld_global_half(const void* p) { return host_ld_global<u16>(p); }
LQ_DEVICE void st_global4(void* p, Vec4 v) { host_st_global(p, v); }
LQ_DEVICE void st_global2(void* p, u32 x, u32 y) { host_st_global(p, (u64)x | (u64)y << 32); }
LQ_DEVICE void st_global_double(void* p, double v) { host_st_global(p, v); }
LQ_DEVICE void st_global1(void* p, u32 v) { host_st_global(p, v); }
LQ_DEVICE void st_global_half(void* p, u16 v) { host_st_global(p, v); }
LQ_DEVICE u32 atomic_add(u32* p, u32 v) {
    const u32 old = host_ld_global<u32>(p);
    host_st_global(p, old + v);
    return old;
}

LQ_DEVICE void block_sync() {
    host::vm().self().at_block_barrier = true;
    host::vm().yield();
}
LQ_DEVICE void warp_sync() { host::vm().warp_wide(host::Op::WarpSync); }
LQ_DEVICE void fence_gpu() {}
LQ_DEVICE void wait_for_previous_kernel() {}
LQ_DEVICE void let_next_kernel_start() {}

LQ_DEVICE u64 l2_policy(bool) { return 0; }

LQ_DEVICE void copy_async16(u32 to, const void* from, u64 = 0) {
    const char* source = host::vm().global(from, 16, false);
    host::vm().start_copy(to, 16);
    host::vm().self().open_group.push_back({to, source, 16});
}
LQ_DEVICE void copy_async_commit() {
    host::Fiber& f = host::vm().self();
    f.groups.push_back(std::move(f.open_group));
    f.open_group.clear();
}
template <int Pending>
void copy_async_wait() {
    host::Fiber& f = host::vm().self();
    while (f.groups.size() > (size_t)Pending) {
        for (const host::PendingCopy& copy : f.groups.front()) host::vm().land(copy);
        f.groups.erase(f.groups.begin());
    }
}

LQ_DEVICE void load_matrix4(u32 (&r)[4], u32 row_address) {
    host::Slot& slot = host::vm().self().slot;
    slot.in[0] = row_address;
    host::vm().warp_wide(host::Op::LoadMatrix);
    memcpy(r, slot.out, 16);
}
inline void host_mma(host::Op op, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::Slot& slot = host::vm().self().slot;
    memcpy(slot.in, a, 16);
    slot.in[4] = b0, slot.in[5] = b1;
    memcpy(slot.c, c, 16);
    host::vm().warp_wide(op);
    memcpy(c, slot.c, 16);
}
LQ_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { host_mma(host::Op::MmaBf16, c, a, b0, b1); }
LQ_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { host_mma(host::Op::MmaF16, c, a, b0, b1); }

LQ_DEVICE void mma_bf16_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for (float& v : c) v = 0.0f;
    mma_bf16(c, a, b0, b1);
}
LQ_DEVICE void mma_f16_new(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for (float& v : c) v = 0.0f;
    mma_f16(c, a, b0, b1);
}

LQ_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    return host::pairwise(a, b, c, [](u16 x, u16 y, u16 z) {
        // The product of two 8-bit significands is exact in float32, and so is every sum these kernels form.
        return host::bfloat_bits(host::bfloat_to_float(x) * host::bfloat_to_float(y) + host::bfloat_to_float(z));
    });
}
LQ_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return host::pairwise(a, b, c, [](u16 x, u16 y, u16 z) {
        return host::half_bits((double)host::half_to_float(x) * host::half_to_float(y) + host::half_to_float(z));
    });
}
LQ_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 chosen = selector >> 4 * i & 15;
        if (chosen > 7) host::vm().fail("a selector of permute has its highest bit set");
        d |= (u32)(bytes >> 8 * chosen & 255) << 8 * i;
    }
    return d;
}
LQ_DEVICE float bits_to_float(u32 v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
LQ_DEVICE u32 float_to_bits(float v) {
    u32 u;
    memcpy(&u, &v, 4);
    return u;
}
LQ_DEVICE float bf16_to_float(u16 v) { return host::bfloat_to_float(v); }
LQ_DEVICE float f16_to_float(u16 v) { return host::half_to_float(v); }
LQ_DEVICE u16 float_to_bf16(float v) { return host::bfloat_bits(v); }
LQ_DEVICE u16 float_to_f16(float v) { return host::half_bits(v); }
LQ_DEVICE float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
LQ_DEVICE float div_rn(float a, float b) { return a / b; }
LQ_DEVICE float sqrt_rn(float a) { return std::sqrt(a); }
LQ_DEVICE double mul_rn(double a, double b) { return a * b; }
LQ_DEVICE double add_rn(double a, double b) { return a + b; }
LQ_DEVICE float round_even(float a) { return std::nearbyint(a); }
LQ_DEVICE double round_even(double a) { return std::nearbyint(a); }
LQ_DEVICE float exp_approx(float a) { return std::exp(a); }

LQ_DEVICE float shuffle_xor(float v, int mask) {
    host::Slot& slot = host::vm().self().slot;
    slot.in[0] = float_to_bits(v);
    slot.in[1] = (u32)mask;
    host::vm().warp_wide(host::Op::ShuffleXor);
    return bits_to_float(slot.out[0]);
}
LQ_DEVICE u32 shuffle_xor(u32 v, int mask) { return float_to_bits(shuffle_xor(bits_to_float(v), mask)); }
LQ_DEVICE u32 shuffle_from(u32 v, int lane) {
    host::Slot& slot = host::vm().self().slot;
    slot.in[0] = v;
    slot.in[1] = (u32)lane;
    host::vm().warp_wide(host::Op::ShuffleFrom);
    return slot.out[0];
}

#endif  // LOOPQ_PRIMITIVES_CUH
