//! A sum on a fixed grid: `value = (hi * 2^62 + lo) * 2^-60`, `0 <= lo < 2^62`.

/// Bits of the low limb; the two limbs together are one integer in units of `2^UNIT_EXPONENT`.
pub const LIMB_BITS: u32 = 62;

/// Exponent of the grid.
pub const UNIT_EXPONENT: i32 = -60;

/// Largest high limb of a sum within `SUM_LIMIT` = 2^64, float32 rounding of its last block included.
pub(crate) const HI_LIMIT: i64 = (1 << LIMB_BITS) + (1 << (LIMB_BITS - 10));

const MASK: i64 = (1 << LIMB_BITS) - 1;
pub(crate) const HI_PER_ONE: f32 = 0.25;
pub(crate) const ONE_PER_HI: f32 = 4.0;
pub(crate) const LO_PER_ONE: f32 = 1_152_921_504_606_846_976.0; // 2^60

/// Adds float32 sums to their limbs; `sums` holds one run of `hi.len()` sums or several behind each other. Exact for
/// magnitudes of `2^-36` and more; below, the sum is rounded to the grid, half to even. Magnitudes stay below `2^64`,
/// which the row limit guarantees.
#[inline(always)]
pub(crate) fn add(sums: &[f32], hi: &mut [i64], lo: &mut [i64]) {
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

/// Splits a double into what [`add_one`] takes. Exact but for what lies below the grid, which is rounded half to even.
/// Magnitudes stay below `2^64`.
pub(crate) fn split(value: f64) -> (i64, i64) {
    let whole = (value * f64::from(HI_PER_ONE)).trunc();
    let rest = whole.mul_add(-f64::from(ONE_PER_HI), value);
    let fine = (rest * f64::from(LO_PER_ONE)).round_ties_even();
    (whole as i64, fine as i64)
}

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
