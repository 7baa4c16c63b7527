//! The tile with AVX2 and with AVX-512 VNNI.
#![allow(unsafe_code)] // intrinsics; the functions below that name their instruction set inline all of them

#[allow(clippy::wildcard_imports)] // some sixty intrinsics
use std::arch::x86_64::*;

use super::layout::{unit_inputs, unit_lines, Block, ScaleFormat, LANES, LINE};
use super::streams::Part;
use super::tile::{codes_of, lines_of, multiply, panel, values_of, Lanes, Panel, Sums, AHEAD};
use super::versions::{stream_versions, versions};
use super::windows::{half_of, Windows};

/// One 512-bit register for 16 outputs; `vpdpbusd` multiplies unsigned by signed bytes and adds four products to a sum.
/// With `VBMI` a byte is any eight neighbouring bits of a register.
pub(super) struct Wide<const VBMI: bool>;

type Vnni = Wide<false>;

// In both implementations every block has the same two reasons: the trait's callers have the instructions, and its
// pointers point to as many bytes as are read or written, at any alignment.
impl<const VBMI: bool> Lanes for Wide<VBMI> {
    type Codes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    const WAITS: bool = true;
    /// Signed levels become unsigned.
    const RAISED: u8 = 128;

    #[inline(always)]
    unsafe fn line(at: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn bits(c: __m512i, by: u32, mask: u8) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let c = if by == 0 { c } else { _mm512_srl_epi32(c, _mm_cvtsi32_si128(by as i32)) };
            _mm512_and_si512(c, _mm512_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: __m512i, c: __m512i, x: *const i8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(sum, c, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn look_up(c: __m512i, levels: &[i8; 16]) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let levels = _mm_xor_si128(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(i8::MIN));
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), c)
        }
    }

    #[inline(always)]
    unsafe fn dot_levels(sum: __m512i, c: __m512i, x: *const i8) -> __m512i {
        // SAFETY: see above.
        unsafe { Self::dot::<true>(sum, c, x) }
    }

    #[inline(always)]
    unsafe fn splat(value: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn times(bytes: *const u8, value: i32) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast()));
            _mm512_mullo_epi32(bytes, _mm512_set1_epi32(value))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn float(sums: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    unsafe fn splat_float(value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8, format: ScaleFormat) -> __m512 {
        // SAFETY: see above.
        unsafe {
            match format {
                ScaleFormat::F32 => _mm512_loadu_ps(at.cast()),
                ScaleFormat::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
                ScaleFormat::Bf16 => {
                    let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn minus(c: __m512i, by: u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sub_epi8(c, _mm512_set1_epi8(by as i8)) }
    }

    #[inline(always)]
    unsafe fn store_codes(to: *mut u8, c: __m512i) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(to.cast(), c) }
    }

    #[inline(always)]
    unsafe fn load_ints(at: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, values: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, values) }
    }

    #[inline(always)]
    unsafe fn pair<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> [__m512i; 2] {
        // SAFETY: see above. Sixteen rows of up to 3 bits find their states in eight bytes, of 4 bits in two times eight.
        unsafe {
            let half = if VBMI && BITS == 4 { half_of(BITS) / 2 } else { half_of(BITS) };
            [Self::sums::<BITS>(at.add(half), next.add(half), windows), Self::sums::<BITS>(at, next, windows)]
        }
    }

    #[inline(always)]
    unsafe fn dot_pair(sum: __m512i, pair: __m512i, x: *const i16) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpwssd_epi32(sum, pair, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn in_order<const BITS: u32>(sums: [__m512i; 2]) -> [__m512i; 2] {
        if !VBMI || BITS != 4 {
            return sums;
        }
        // Of four lanes the last two have rows 0 to 7, in the second register 8 to 15. The first two have rows 16 to 23
        // and 24 to 31.
        // SAFETY: see above.
        unsafe {
            let first = _mm512_setr_epi32(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
            let last = _mm512_sub_epi32(first, _mm512_set1_epi32(2));
            let [a, b] = sums;
            [_mm512_permutex2var_epi32(a, first, b), _mm512_permutex2var_epi32(a, last, b)]
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Two 256-bit registers for 16 outputs.
pub(super) struct Avx2;

/// `f` of both halves.
macro_rules! both {
    (|$($x:ident),*| $f:expr) => {
        [{ $(let $x = $x[0];)* $f }, { $(let $x = $x[1];)* $f }]
    };
}

/// `f` of both halves of some units: where a half's sums fill the registers, all units of one half come first.
macro_rules! for_strips {
    ($units_first:expr, $units:expr, |$unit:ident, $half:ident| $f:block) => {
        if $units_first {
            for $unit in $units {
                for $half in 0..2 $f
            }
        } else {
            for $half in 0..2 {
                for $unit in $units $f
            }
        }
    };
}

impl Avx2 {
    /// Four products of unsigned and signed bytes, added up; the sum of two must fit 16 bits.
    #[inline(always)]
    unsafe fn products(c: __m256i, x: __m256i, weight: i16) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(c, x), _mm256_set1_epi16(weight)) }
    }
}

impl Lanes for Avx2 {
    type Codes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];

    const WAITS: bool = false;
    const RAISED: u8 = 0;

    /// Products of codes of up to 4 bits are added up in 16 bits as far as they fit, and only then in 32.
    #[inline(always)]
    unsafe fn products_of<
        const BITS: u32,
        const TABLE: bool,
        const L: usize,
        const T: usize,
        const S: usize,
    >(
        p: &Panel<'_>,
        panel: usize,
        block: &Block,
        x: *const i8,
        sums: &mut Sums<[__m256i; 2], L, T, S>,
    ) {
        let (lines, inputs) = (unit_lines(BITS), unit_inputs(BITS));
        // The sum of one instruction: two products of the largest code and -128.
        let largest = 2 * 128 * ((1 << BITS) - 1);
        let units_at_once = i16::MAX as usize / largest / (inputs / 4);
        // SAFETY: as in `multiply`.
        unsafe {
            if !TABLE && units_at_once == 0 {
                return multiply::<Self, BITS, TABLE, L, T, S>(p, panel, block, x, sums);
            }
            let at = p.bytes.as_ptr().add(panel * p.layout.panel + block.codes);
            let strip_of = |unit: usize, half: usize| {
                let strip = at.add((2 * unit + half) * lines * LINE);
                for line in 0..lines {
                    Self::prefetch(strip.wrapping_add(AHEAD + line * LINE));
                }
                lines_of::<Self, BITS>(strip)
            };
            let input = |unit: usize, row: usize, plane: usize| {
                x.add(row * p.rows.stride + unit * inputs + plane * 4)
            };
            if TABLE {
                for_strips!(T * L == 1, 0..block.units, |unit, half| {
                    let strip = strip_of(unit, half);
                    for plane in 0..inputs / 4 {
                        let levels = values_of::<Self, BITS, TABLE>(p, strip, plane);
                        for t in 0..T {
                            for limb in 0..L {
                                let sum = sums[0][t][limb][half];
                                let x = input(unit, t * L + limb, plane);
                                sums[0][t][limb][half] = Self::dot_levels(sum, levels, x);
                            }
                        }
                    }
                });
                return;
            }
            let one = _mm256_set1_epi16(1);
            let mut unit = 0;
            while unit < block.units {
                let end = (unit + units_at_once).min(block.units);
                let mut short = [[[[_mm256_setzero_si256(); 2]; 2]; L]; T];
                for_strips!(T * L == 1, unit..end, |unit, half| {
                    let strip = strip_of(unit, half);
                    for plane in 0..inputs / 4 {
                        let codes = codes_of::<Self, BITS>(strip, plane);
                        for t in 0..T {
                            for limb in 0..L {
                                let x = input(unit, t * L + limb, plane);
                                let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
                                let sum = short[t][limb][half];
                                short[t][limb][half] = both!(|sum, codes| {
                                    _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x))
                                });
                            }
                        }
                    }
                });
                // By number: taken by reference, they would be stored at every step.
                for t in 0..T {
                    for limb in 0..L {
                        for half in 0..2 {
                            let (long, short) = (sums[0][t][limb][half], short[t][limb][half]);
                            sums[0][t][limb][half] =
                                both!(|long, short| _mm256_add_epi32(long, _mm256_madd_epi16(short, one)));
                        }
                    }
                }
                unit = end;
            }
        }
    }

    #[inline(always)]
    unsafe fn line(at: *const u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(LINE / 2).cast())] }
    }

    #[inline(always)]
    unsafe fn bits(c: [__m256i; 2], by: u32, mask: u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi8(mask as i8);
            if by == 0 {
                return both!(|c| _mm256_and_si256(c, mask));
            }
            let by = _mm_cvtsi32_si128(by as i32);
            both!(|c| _mm256_and_si256(_mm256_srl_epi32(c, by), mask))
        }
    }

    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { both!(|a, b| _mm256_or_si256(a, b)) }
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: [__m256i; 2], c: [__m256i; 2], x: *const i8) -> [__m256i; 2] {
        // SAFETY: see above. Two products of 4-bit codes fit 16 bits. Two of 8-bit codes would not, so the code is
        // taken as two digits.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            if WIDE {
                let (low, high) = (Self::bits(c, 0, 15), Self::bits(c, 4, 15));
                both!(|sum, low, high| {
                    let digits = _mm256_add_epi32(Self::products(low, x, 1), Self::products(high, x, 16));
                    _mm256_add_epi32(sum, digits)
                })
            } else {
                both!(|sum, c| _mm256_add_epi32(sum, Self::products(c, x, 1)))
            }
        }
    }

    #[inline(always)]
    unsafe fn look_up(c: [__m256i; 2], levels: &[i8; 16]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast()));
            both!(|c| _mm256_shuffle_epi8(levels, c))
        }
    }

    #[inline(always)]
    unsafe fn dot_levels(sum: [__m256i; 2], c: [__m256i; 2], x: *const i8) -> [__m256i; 2] {
        // SAFETY: see above. The sign of the input is moved to the level, which is at least -127. So two products stay
        // within `2 * 128 * 127`, which fits 16 bits.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            let size = _mm256_abs_epi8(x);
            both!(|sum, c| _mm256_add_epi32(sum, Self::products(size, _mm256_sign_epi8(c, x), 1)))
        }
    }

    #[inline(always)]
    unsafe fn splat(value: i32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    unsafe fn times(bytes: *const u8, value: i32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let eight = [_mm_loadl_epi64(bytes.cast()), _mm_loadl_epi64(bytes.add(LANES / 2).cast())];
            both!(|eight| _mm256_mullo_epi32(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(value)))
        }
    }

    #[inline(always)]
    unsafe fn add(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { both!(|a, b| _mm256_add_epi32(a, b)) }
    }

    #[inline(always)]
    unsafe fn float(sums: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(|sums| _mm256_cvtepi32_ps(sums)) }
    }

    #[inline(always)]
    unsafe fn splat_float(value: f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8, format: ScaleFormat) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            if format == ScaleFormat::F32 {
                return [_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(4 * LANES / 2).cast())];
            }
            let words = [_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(LANES).cast())];
            if format == ScaleFormat::F16 {
                return both!(|words| _mm256_cvtph_ps(words));
            }
            both!(|words| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words))))
        }
    }

    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(|a, b| _mm256_mul_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(|a, b, c| _mm256_fmadd_ps(a, b, c)) }
    }

    #[inline(always)]
    unsafe fn minus(c: [__m256i; 2], by: u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { both!(|c| _mm256_sub_epi8(c, _mm256_set1_epi8(by as i8))) }
    }

    #[inline(always)]
    unsafe fn store_codes(to: *mut u8, c: [__m256i; 2]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(to.cast(), c[0]);
            _mm256_storeu_si256(to.add(LINE / 2).cast(), c[1]);
        }
    }

    #[inline(always)]
    unsafe fn load_ints(at: *const i32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(LANES / 2).cast())] }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(LANES / 2))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, values: [__m256; 2]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, values[0]);
            _mm256_storeu_ps(to.add(LANES / 2), values[1]);
        }
    }

    #[inline(always)]
    unsafe fn pair<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> [[__m256i; 2]; 2] {
        // SAFETY: see above.
        unsafe {
            let (low, high) =
                (Self::windows_of::<BITS>(at, windows), Self::windows_of::<BITS>(next, windows));
            let mut pair = [low; 4];
            for row in 0..4 {
                let one = _mm256_set1_epi16(1);
                let low = _mm256_madd_epi16(Self::sums_of::<BITS>(low, row, windows), one);
                let high = _mm256_madd_epi16(Self::sums_of::<BITS>(high, row, windows), one);
                pair[row] = _mm256_or_si256(low, _mm256_slli_epi32::<16>(high));
            }
            [[pair[0], pair[1]], [pair[2], pair[3]]]
        }
    }

    #[inline(always)]
    unsafe fn dot_pair(sum: [__m256i; 2], pair: [__m256i; 2], x: *const i16) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            both!(|sum, pair| _mm256_add_epi32(sum, _mm256_madd_epi16(pair, x)))
        }
    }

    #[inline(always)]
    unsafe fn add_pair<const BITS: u32, const W: usize>(
        sums: &mut [[[__m256i; 2]; 2]; W],
        at: *const u8,
        next: *const u8,
        windows: &Windows,
        x: [*const i16; W],
    ) {
        // SAFETY: see above.
        unsafe {
            for input in 0..2 {
                let found = Self::windows_of::<BITS>(if input == 0 { at } else { next }, windows);
                for row in 0..4 {
                    let values = Self::sums_of::<BITS>(found, row, windows);
                    for word in 0..W {
                        let products = _mm256_madd_epi16(values, _mm256_set1_epi16(*x[word].add(input)));
                        let sum = &mut sums[word][row / 2][row % 2];
                        *sum = _mm256_add_epi32(*sum, products);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn in_order<const BITS: u32>(sums: [[__m256i; 2]; 2]) -> [[__m256i; 2]; 2] {
        // Lane `l` of number `i` has row `4 l + i`. SAFETY: see above.
        unsafe {
            let [[a, b], [c, d]] = sums;
            let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (low2, high2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            let [a, b] = [_mm256_unpacklo_epi64(low, low2), _mm256_unpackhi_epi64(low, low2)];
            let [c, d] = [_mm256_unpacklo_epi64(high, high2), _mm256_unpackhi_epi64(high, high2)];
            [
                [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x20>(c, d)],
                [_mm256_permute2x128_si256::<0x31>(a, b), _mm256_permute2x128_si256::<0x31>(c, d)],
            ]
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

stream_versions!(
    streams_vbmi,
    Wide<true>,
    [8, 4],
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma"
);
stream_versions!(streams_vnni, Vnni, [8, 4], "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma");
stream_versions!(streams_avx2, Avx2, [2, 1], "avx2,fma,f16c");
versions!(panel_vnni, panel, Vnni, [4, 4, 4], "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma");
versions!(panel_avx2, panel, Avx2, [4, 2, 1], "avx2,fma,f16c");
versions!(
    panel_amx,
    super::amx::panel,
    Vnni,
    [16, 16, 16],
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma"
);
