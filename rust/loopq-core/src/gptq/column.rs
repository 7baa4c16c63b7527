//! Rounding one column of many rows.

use crate::grid::Steps;
use crate::simd::{per_isa, Real};

/// Input and output of rounding one column of a batch of rows; `values`, `scale` and `zero` have the same length.
pub(super) struct Column<'a, T, S> {
    /// In: the updated weights. Out: the errors `w - q`.
    pub(super) values: &'a mut [T],
    /// The original weights.
    pub(super) original: &'a [f32],
    /// Scale per row.
    pub(super) scale: &'a [f32],
    /// Zero point per row.
    pub(super) zero: &'a [f32],
    /// Biased codes.
    pub(super) codes: &'a mut [u8],
    /// Sum of `pivot * (updated - q)^2` per row: the proxy with the damped Hessian.
    pub(super) damped: &'a mut [f64],
    /// Sum of `mu * (w - q)^2` per row: the share that the damping adds.
    pub(super) added: &'a mut [f64],
    /// `R_jj^2`.
    pub(super) pivot: f64,
    /// The column's damping.
    pub(super) mu: f64,
    /// Decodes codes, in units of the scale.
    pub(super) steps: S,
}

/// 2^52: adding it to a smaller whole number puts that number in the low bits.
const WHOLE: f64 = 4_503_599_627_370_496.0;

per_isa! {
    /// Rounds a column, half to even where values are evenly spaced.
    pub(super) fn round_column<T: Real, S: Steps>(c: Column<'_, T, S>) = round_body;
}

#[inline(always)]
fn round_body<T: Real, S: Steps>(c: Column<'_, T, S>) {
    let n = c.values.len();
    let (original, scale, zero) = (&c.original[..n], &c.scale[..n], &c.zero[..n]);
    let (codes, damped, added) = (&mut c.codes[..n], &mut c.damped[..n], &mut c.added[..n]);
    for i in 0..n {
        let updated = c.values[i].wide();
        let code = c.steps.code(updated / f64::from(scale[i]), f64::from(zero[i]));
        codes[i] = (code + WHOLE).to_bits() as u8;
        let value = c.steps.step(code as f32, zero[i]) * scale[i];
        let gap = updated - f64::from(value);
        let e = T::of(f64::from(original[i])) - T::of(f64::from(value));
        damped[i] += c.pivot * gap * gap;
        added[i] += c.mu * (e.wide() * e.wide());
        c.values[i] = e;
    }
}
