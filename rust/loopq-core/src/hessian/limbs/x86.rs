//! The 512-bit version of [`super::add`].
#![allow(unsafe_code)] // pointers into slices whose lengths have been checked

#[allow(clippy::wildcard_imports)] // some twenty intrinsics
use std::arch::x86_64::*;

use super::{HI_PER_ONE, LO_PER_ONE, ONE_PER_HI};

/// Sixteen float32 sums on the grid: two vectors of high parts, and two of low parts of at most `2^61` in magnitude.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
fn on_grid(sum: __m512) -> [__m512i; 4] {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let whole = _mm512_roundscale_ps::<NEAREST>(_mm512_mul_ps(sum, _mm512_set1_ps(HI_PER_ONE)));
    let rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(ONE_PER_HI), sum);
    let fine = _mm512_mul_ps(rest, _mm512_set1_ps(LO_PER_ONE));
    [
        _mm512_cvtps_epi64(_mm512_castps512_ps256(whole)),
        _mm512_cvtps_epi64(_mm512_extractf32x8_ps::<1>(whole)),
        _mm512_cvtps_epi64(_mm512_castps512_ps256(fine)),
        _mm512_cvtps_epi64(_mm512_extractf32x8_ps::<1>(fine)),
    ]
}

/// Adds float32 sums to their limbs. Two runs of sums at a time share a carry, because a low limb plus two low parts
/// stays below `2^63`.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
pub(super) fn add(sums: &[f32], hi: &mut [i64], lo: &mut [i64]) {
    let n = hi.len();
    assert!(n.is_multiple_of(16) && n > 0 && lo.len() == n && sums.len().is_multiple_of(n));
    let mask = _mm512_set1_epi64((1 << 62) - 1);
    for at in (0..n).step_by(16) {
        // SAFETY: `at + 16 <= n`, the length of `hi` and `lo`, and every run of `sums` has `n` entries.
        unsafe {
            let (ph, pl) = (hi.as_mut_ptr().add(at), lo.as_mut_ptr().add(at));
            let mut high = [_mm512_loadu_si512(ph.cast()), _mm512_loadu_si512(ph.add(8).cast())];
            let mut low = [_mm512_loadu_si512(pl.cast()), _mm512_loadu_si512(pl.add(8).cast())];
            for runs in sums.chunks(2 * n) {
                let mut part = on_grid(_mm512_loadu_ps(runs.as_ptr().add(at)));
                if runs.len() > n {
                    let second = on_grid(_mm512_loadu_ps(runs.as_ptr().add(n + at)));
                    for (part, second) in part.iter_mut().zip(second) {
                        *part = _mm512_add_epi64(*part, second);
                    }
                }
                for half in 0..2 {
                    let sum = _mm512_add_epi64(low[half], part[2 + half]);
                    let carried = _mm512_add_epi64(part[half], _mm512_srai_epi64::<62>(sum));
                    high[half] = _mm512_add_epi64(high[half], carried);
                    low[half] = _mm512_and_si512(sum, mask);
                }
            }
            _mm512_storeu_si512(ph.cast(), high[0]);
            _mm512_storeu_si512(ph.add(8).cast(), high[1]);
            _mm512_storeu_si512(pl.cast(), low[0]);
            _mm512_storeu_si512(pl.add(8).cast(), low[1]);
        }
    }
}
