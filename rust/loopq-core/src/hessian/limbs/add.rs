//! Float32 sums added to their limbs.
#![allow(unsafe_code)] // one call of a function whose instructions an `Isa` has shown to exist

use super::{add_one, HI_PER_ONE, LO_PER_ONE, ONE_PER_HI};
use crate::simd::{per_isa, Isa};

/// Adds float32 sums to their limbs; `sums` holds one run of `hi.len()` sums or several behind each other, `hi` and `lo`
/// have one length, a multiple of 16. Exact for magnitudes of `2^-36` and more; below, the sum is rounded to the grid,
/// half to even. Magnitudes stay below `2^64`, which the row limit guarantees.
#[inline]
pub(crate) fn add(isa: Isa, sums: &[f32], hi: &mut [i64], lo: &mut [i64]) {
    #[cfg(target_arch = "x86_64")]
    if isa.level() >= 3 {
        // SAFETY: `Isa` values above the portable one are made only after asking the machine.
        return unsafe { super::x86::add(sums, hi, lo) };
    }
    add_plain(isa, sums, hi, lo);
}

per_isa! {
    fn add_plain(sums: &[f32], hi: &mut [i64], lo: &mut [i64]) = add_body;
}

#[inline(always)]
fn add_body(sums: &[f32], hi: &mut [i64], lo: &mut [i64]) {
    for sums in sums.chunks_exact(hi.len()) {
        for ((&sum, hi), lo) in sums.iter().zip(&mut *hi).zip(&mut *lo) {
            let whole = (sum * HI_PER_ONE).round_ties_even();
            // |sum - 4 whole| <= 2 and both are multiples of sum's last place, so the difference is exact.
            let rest = whole.mul_add(-ONE_PER_HI, sum);
            let fine = (rest * LO_PER_ONE).round_ties_even() as i64;
            add_one(hi, lo, whole as i64, fine);
        }
    }
}
