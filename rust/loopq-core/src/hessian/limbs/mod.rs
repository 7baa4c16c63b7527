//! A sum on a fixed grid: `value = (hi * 2^62 + lo) * 2^-60`, `0 <= lo < 2^62`.
//!
//! Integers add up to the same sum in any order, floats do not. That a sum of floats can be kept as one wide fixed-point
//! number is U. Kulisch's idea (*Computer Arithmetic and Validity*, 2008); two words are enough here because the largest
//! magnitude and the smallest step that matters are both fixed by the specification (`docs/formats/hessian.md`).
//!
//! Adding a float32 takes four steps. (1) Its multiple of 4, rounded to nearest, goes to `hi`. (2) The rest, at most 2
//! in magnitude, is exact in float32. (3) In units of `2^-60` the rest is a whole number of at most `2^61`. (4) The sum
//! of that and `lo` stays below `2^63`; its bits beyond 62 are the carry.

mod add;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use add::add;

/// Bits of the low limb; the two limbs together are one integer in units of `2^-60`.
const LIMB_BITS: u32 = 62;

/// Largest high limb of a sum within `SUM_LIMIT` = 2^64, float32 rounding of its last block included.
pub(crate) const HI_LIMIT: i64 = (1 << LIMB_BITS) + (1 << (LIMB_BITS - 10));

const MASK: i64 = (1 << LIMB_BITS) - 1;
const HI_PER_ONE: f32 = 0.25;
const ONE_PER_HI: f32 = 4.0;
const LO_PER_ONE: f32 = 1_152_921_504_606_846_976.0; // 2^60

/// The value of one unit of a high limb.
pub(super) const HI_UNIT: f64 = ONE_PER_HI as f64;

/// Adds one number on the grid, with a low part that may be negative, and keeps `lo` in its range.
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
