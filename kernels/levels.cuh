// Levels of a table by their codes. A table is 16 bytes, one for each code. A byte is the level in sixteenths
// of the scale, plus 128. Include primitives.cuh first.

#ifndef LOOPQ_LEVELS_CUH
#define LOOPQ_LEVELS_CUH

namespace loopq {

constexpr int kZeroLevel = 128;
constexpr float kLevelStep = 1.0f / 16;

// The bytes of a word's eight codes, those of the four lowest first. The low three bits of a code choose a byte of either half
// of the table, the fourth bit chooses between the two.
LQ_DEVICE void look_up(const Vec4& table, u32 codes, u32 (&found)[2]) {
    u32 place = codes & 0x77777777u;
    u32 half = (codes >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        found[i] = permute(permute(table.x, table.y, place), permute(table.z, table.w, place), half);
        place >>= 16, half >>= 16;
    }
}

}  // namespace loopq

#endif  // LOOPQ_LEVELS_CUH
