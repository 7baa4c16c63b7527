//! A sum on a fixed grid: `value = (hi * 2^62 + lo) * 2^-60`, `0 <= lo < 2^62`.
//!
//! Integers add up to the same sum in any order, floats do not. That a sum of floats can be kept as one wide fixed-point
//! number is U. Kulisch's idea (*Computer Arithmetic and Validity*, 2008); two words are enough here because the largest
//! magnitude and the smallest step that matters are both fixed by the specification (`docs/formats/hessian.md`).
//!
//! Adding a float32 takes four steps: (1) its multiple of 4, rounded to nearest, goes to `hi`; (2) what is left, at most
//! 2 in magnitude, is exact in float32; (3) in units of `2^-60` it is a whole number of at most `2^61`; (4) the sum of
//! that and `lo` stays below `2^63`, and what it has beyond 62 bits is the carry.
#![allow(unsafe_code)] // one call of a function whose instructions an `Isa` has shown to exist

use crate::simd::{per_isa, Isa};

/// Bits of the low limb; the two limbs together are one integer in units of `2^-60`.
const LIMB_BITS: u32 = 62;

/// Largest high limb of a sum within `SUM_LIMIT` = 2^64, float32 rounding of its last block included.
pub(crate) const HI_LIMIT: i64 = (1 << LIMB_BITS) + (1 << (LIMB_BITS - 10));

const MASK: i64 = (1 << LIMB_BITS) - 1;
pub(super) const HI_PER_ONE: f32 = 0.25;
pub(super) const ONE_PER_HI: f32 = 4.0;
pub(super) const LO_PER_ONE: f32 = 1_152_921_504_606_846_976.0; // 2^60

/// Adds float32 sums to their limbs; `sums` holds one run of `hi.len()` sums or several behind each other, `hi` and `lo`
/// have one length, a multiple of 16. Exact for magnitudes of `2^-36` and more; below, the sum is rounded to the grid,
/// half to even. Magnitudes stay below `2^64`, which the row limit guarantees.
#[inline]
pub(crate) fn add(isa: Isa, sums: &[f32], hi: &mut [i64], lo: &mut [i64]) {
    #[cfg(target_arch = "x86_64")]
    if isa.level() >= 3 {
        // SAFETY: `Isa` values above the portable one are made only after asking the machine.
        return unsafe { super::limbs_x86::add(sums, hi, lo) };
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

/// What one unit of a high limb is worth.
pub(super) const HI_UNIT: f64 = ONE_PER_HI as f64;

/// Adds one number on the grid, whose low part may be negative, and keeps `lo` in its range.
#[inline(always)]
pub(crate) fn add_one(hi: &mut i64, lo: &mut i64, add_hi: i64, add_lo: i64) {
    let sum = *lo + add_lo;
    *hi += add_hi + (sum >> LIMB_BITS);
    *lo = sum & MASK;
}

/// The whole sum as one integer in grid units.
#[inline]
pub(crate) fn integer(hi: i64, lo: i64) -> i128 {
    (i128::from(hi) << LIMB_BITS) + i128::from(lo)
}

/// The sum rounded once to double precision.
#[inline]
pub(crate) fn to_f64(units: i128) -> f64 {
    // 2^-60 is a power of two and the product is never subnormal: no second rounding.
    units as f64 * f64::from(LO_PER_ONE).recip()
}

/// Whether a stored pair is one that [`add_one`] can have left.
pub(crate) fn is_canonical(lo: i64) -> bool {
    (0..=MASK).contains(&lo)
}
