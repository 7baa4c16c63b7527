//! Values of codes on a trellis with AVX2 and with AVX-512.
#![allow(unsafe_code)] // intrinsics, as in `x86`

#[allow(clippy::wildcard_imports)] // some twenty intrinsics
use std::arch::x86_64::*;

use super::tile::Lanes;
use super::windows::{half_of, Windows};
use super::x86::{Avx2, Wide};
use loopq_core::grid::{FACTOR, OFFSET};

// The blocks have the reasons of those in `x86`.
impl<const VBMI: bool> Wide<VBMI> {
    /// Sixteen states, each mixed into four bytes.
    #[inline(always)]
    unsafe fn mixed<const BITS: u32>(at: *const u8, windows: &Windows) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let found = if VBMI {
                let bits = if BITS == 4 {
                    _mm512_broadcast_i32x4(_mm_loadu_si128(at.cast()))
                } else {
                    _mm512_set1_epi64(at.cast::<i64>().read_unaligned())
                };
                _mm512_multishift_epi64_epi8(Self::line(windows.starts.as_ptr()), bits)
            } else {
                let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(at.cast()));
                let found = _mm512_shuffle_epi8(bytes, Self::line(windows.bytes.as_ptr()));
                _mm512_srlv_epi32(found, Self::line(windows.shifts.as_ptr().cast()))
            };
            let states = _mm512_and_si512(found, _mm512_set1_epi32(windows.mask as i32));
            let times = _mm512_mullo_epi32(states, _mm512_set1_epi32(FACTOR as i32));
            _mm512_add_epi32(times, _mm512_set1_epi32(OFFSET as i32))
        }
    }

    /// Values of sixteen rows in two records, side by side in each lane.
    #[inline(always)]
    pub(super) unsafe fn sums<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> __m512i {
        // SAFETY: see above. The sum of distances from zero comes once for each number of 16 bits.
        unsafe {
            let zero = _mm512_setzero_si512();
            let low = _mm512_dbsad_epu8::<0>(Self::mixed::<BITS>(at, windows), zero);
            _mm512_mask_dbsad_epu8::<0>(low, 0xaaaa_aaaa, Self::mixed::<BITS>(next, windows), zero)
        }
    }
}

impl Avx2 {
    /// Windows of 32 bits in which four neighbouring rows find their states, so that it is shuffled once.
    #[inline(always)]
    pub(super) unsafe fn windows_of<const BITS: u32>(at: *const u8, windows: &Windows) -> __m256i {
        // SAFETY: see above.
        unsafe {
            let first = _mm_loadu_si128(at.add(half_of(BITS)).cast());
            let bytes =
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), _mm_loadu_si128(at.cast()));
            let found = _mm256_shuffle_epi8(bytes, _mm256_loadu_si256(windows.fours.as_ptr().cast()));
            _mm256_srlv_epi32(found, _mm256_loadu_si256(windows.four_shifts.as_ptr().cast()))
        }
    }

    /// Values on a trellis, as sums of two bytes each: lane `l` has row `4 l + row`.
    #[inline(always)]
    pub(super) unsafe fn sums_of<const BITS: u32>(found: __m256i, row: usize, windows: &Windows) -> __m256i {
        // SAFETY: see above.
        unsafe {
            let by = _mm_cvtsi32_si128((3 - row as i32) * BITS as i32);
            let found = if row == 3 { found } else { _mm256_srl_epi32(found, by) };
            let state = _mm256_and_si256(found, _mm256_set1_epi32(windows.mask as i32));
            let times = _mm256_mullo_epi32(state, _mm256_set1_epi32(FACTOR as i32));
            let mixed = _mm256_add_epi32(times, _mm256_set1_epi32(OFFSET as i32));
            _mm256_maddubs_epi16(mixed, _mm256_set1_epi8(1))
        }
    }
}
