//! The tile with NEON and `sdot`, which adds four products of signed bytes to a sum; armv8.2 and later have it.
#![allow(unsafe_code)] // intrinsics; the functions below that name their instruction set inline all of them

#[allow(clippy::wildcard_imports)] // some thirty intrinsics
use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::layout::{ScaleFormat, LANES, LINE};
use super::streams::Part;
use super::tile::{panel, Lanes, Panel};
use super::versions::{stream_versions, versions};
use super::windows::{half_of, Windows};
use loopq_core::grid::{FACTOR, OFFSET};

/// Registers for 16 outputs, and bytes of one.
const PARTS: usize = 4;
const BYTES: usize = LINE / PARTS;

/// Four 128-bit registers for 16 outputs.
struct Neon;

/// `sum` with four products of signed bytes added in each lane; its intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: it reads and writes registers only.
    unsafe {
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sum, in(vreg) a, in(vreg) b,
             options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Four float16 numbers in float32; its intrinsic is younger than the oldest Rust that builds this.
#[inline(always)]
unsafe fn from_half(words: uint16x4_t) -> float32x4_t {
    let numbers: float32x4_t;
    // SAFETY: it reads and writes registers only.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) numbers, in(vreg) words,
             options(pure, nomem, nostack, preserves_flags));
    }
    numbers
}

// Every block has the same two reasons: the trait's callers have the instructions, and its pointers point to as many
// bytes as are read or written, at any alignment.
impl Lanes for Neon {
    type Codes = [uint8x16_t; PARTS];
    type Ints = [int32x4_t; PARTS];
    type Floats = [float32x4_t; PARTS];

    // Eight sums for each limb: as many as are under way at once.
    const WAITS: bool = false;
    const RAISED: u8 = 0;

    #[inline(always)]
    unsafe fn line(at: *const u8) -> Self::Codes {
        // SAFETY: see above.
        from_fn(|i| unsafe { vld1q_u8(at.add(i * BYTES)) })
    }

    #[inline(always)]
    unsafe fn bits(c: Self::Codes, by: u32, mask: u8) -> Self::Codes {
        // SAFETY: see above.
        c.map(|c| unsafe { vandq_u8(vshlq_u8(c, vdupq_n_s8(-(by as i8))), vdupq_n_u8(mask)) })
    }

    #[inline(always)]
    unsafe fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
        // SAFETY: see above.
        from_fn(|i| unsafe { vorrq_u8(a[i], b[i]) })
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: Self::Ints, c: Self::Codes, x: *const i8) -> Self::Ints {
        // SAFETY: see above. Codes of eight bits become signed by taking 128 away, which is given back as the products of
        // the inputs with -128, subtracted. No closures: they would not have this function's instructions.
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
            let mut sum = sum;
            if WIDE {
                let back = sdot(vdupq_n_s32(0), vdupq_n_s8(-128), x);
                for (sum, c) in sum.iter_mut().zip(c) {
                    let signed = vreinterpretq_s8_u8(veorq_u8(c, vdupq_n_u8(128)));
                    *sum = sdot(vsubq_s32(*sum, back), signed, x);
                }
            } else {
                for (sum, c) in sum.iter_mut().zip(c) {
                    *sum = sdot(*sum, vreinterpretq_s8_u8(c), x);
                }
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn look_up(c: Self::Codes, levels: &[i8; 16]) -> Self::Codes {
        // SAFETY: see above.
        unsafe {
            let levels = vld1q_u8(levels.as_ptr().cast());
            c.map(|c| vqtbl1q_u8(levels, c))
        }
    }

    #[inline(always)]
    unsafe fn dot_levels(sum: Self::Ints, c: Self::Codes, x: *const i8) -> Self::Ints {
        // SAFETY: see above.
        unsafe { Self::dot::<false>(sum, c, x) }
    }

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self::Ints {
        // SAFETY: see above.
        unsafe { [vdupq_n_s32(value); PARTS] }
    }

    #[inline(always)]
    unsafe fn times(bytes: *const u8, value: i32) -> Self::Ints {
        // SAFETY: see above.
        unsafe {
            let bytes = vld1q_u8(bytes);
            let halves = [vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))];
            from_fn(|i| {
                let half = halves[i / 2];
                let four = if i % 2 == 0 { vget_low_u16(half) } else { vget_high_u16(half) };
                vmulq_n_s32(vreinterpretq_s32_u32(vmovl_u16(four)), value)
            })
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::Ints, b: Self::Ints) -> Self::Ints {
        // SAFETY: see above.
        from_fn(|i| unsafe { vaddq_s32(a[i], b[i]) })
    }

    #[inline(always)]
    unsafe fn float(sums: Self::Ints) -> Self::Floats {
        // SAFETY: see above.
        sums.map(|sum| unsafe { vcvtq_f32_s32(sum) })
    }

    #[inline(always)]
    unsafe fn splat_float(value: f32) -> Self::Floats {
        // SAFETY: see above.
        unsafe { [vdupq_n_f32(value); PARTS] }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8, format: ScaleFormat) -> Self::Floats {
        // SAFETY: see above.
        unsafe {
            let words = |i: usize| vcreate_u16(at.add(2 * i * LANES / PARTS).cast::<u64>().read_unaligned());
            match format {
                ScaleFormat::F32 => Self::load(at.cast()),
                ScaleFormat::F16 => from_fn(|i| from_half(words(i))),
                ScaleFormat::Bf16 => {
                    from_fn(|i| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(words(i)))))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: see above.
        from_fn(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        // SAFETY: see above.
        from_fn(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }

    #[inline(always)]
    unsafe fn minus(c: Self::Codes, by: u8) -> Self::Codes {
        // SAFETY: see above.
        c.map(|c| unsafe { vsubq_u8(c, vdupq_n_u8(by)) })
    }

    #[inline(always)]
    unsafe fn store_codes(to: *mut u8, c: Self::Codes) {
        for (i, &c) in c.iter().enumerate() {
            // SAFETY: see above.
            unsafe { vst1q_u8(to.add(i * BYTES), c) }
        }
    }

    #[inline(always)]
    unsafe fn load_ints(at: *const i32) -> Self::Ints {
        // SAFETY: see above.
        from_fn(|i| unsafe { vld1q_s32(at.add(i * LANES / PARTS)) })
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self::Floats {
        // SAFETY: see above.
        from_fn(|i| unsafe { vld1q_f32(at.add(i * LANES / PARTS)) })
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, values: Self::Floats) {
        for (i, &part) in values.iter().enumerate() {
            // SAFETY: see above.
            unsafe { vst1q_f32(to.add(i * LANES / PARTS), part) }
        }
    }

    #[inline(always)]
    unsafe fn pair<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> [Self::Codes; 2] {
        // SAFETY: see above.
        unsafe {
            [half_of(BITS), 0].map(|half| {
                let (low, high) = (sums_of(at.add(half), windows), sums_of(next.add(half), windows));
                from_fn(|i| vreinterpretq_u8_u32(vsliq_n_u32::<16>(low[i], high[i])))
            })
        }
    }

    #[inline(always)]
    unsafe fn dot_pair(sum: Self::Ints, pair: Self::Codes, x: *const i16) -> Self::Ints {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (i32::from(*x), i32::from(*x.add(1)));
            from_fn(|i| {
                let pair = vreinterpretq_s32_u8(pair[i]);
                let sum = vmlaq_n_s32(sum[i], vandq_s32(pair, vdupq_n_s32(0xffff)), low);
                vmlaq_n_s32(sum, vshrq_n_s32::<16>(pair), high)
            })
        }
    }

    #[inline(always)]
    unsafe fn add_pair<const BITS: u32, const W: usize>(
        sums: &mut [[Self::Ints; 2]; W],
        at: *const u8,
        next: *const u8,
        windows: &Windows,
        x: [*const i16; W],
    ) {
        // SAFETY: see above.
        unsafe {
            for (input, at) in [at, next].into_iter().enumerate() {
                for (half, offset) in [half_of(BITS), 0].into_iter().enumerate() {
                    let values = sums_of(at.add(offset), windows);
                    for (sum, x) in sums.iter_mut().zip(x) {
                        let x = i32::from(*x.add(input));
                        sum[half] =
                            from_fn(|i| vmlaq_n_s32(sum[half][i], vreinterpretq_s32_u32(values[i]), x));
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) at, options(readonly, nostack, preserves_flags)) }
    }
}

/// Sixteen states as the sums of the bytes that they are mixed into.
///
/// # Safety
/// As the methods of [`Lanes`], with sixteen bytes at `at`.
#[inline(always)]
unsafe fn sums_of(at: *const u8, windows: &Windows) -> [uint32x4_t; PARTS] {
    // SAFETY: see above.
    unsafe {
        let bytes = vld1q_u8(at);
        from_fn(|i| {
            let found = vqtbl1q_u8(bytes, vld1q_u8(windows.bytes.as_ptr().add(i * BYTES)));
            let shifts = vld1q_u32(windows.shifts.as_ptr().add(i * LANES / PARTS));
            let down = vnegq_s32(vreinterpretq_s32_u32(shifts));
            let states = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(found), down), vdupq_n_u32(windows.mask));
            let mixed = vmlaq_u32(vdupq_n_u32(OFFSET), states, vdupq_n_u32(FACTOR));
            vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_u32(mixed)))
        })
    }
}

stream_versions!(streams_neon, Neon, [1, 1], "neon,dotprod");
versions!(panel_neon, panel, Neon, [1, 1, 1], "neon,dotprod");
