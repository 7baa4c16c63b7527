//! Short loops over lanes, compiled once per instruction set from one body.
//!
//! The bodies hold no intrinsics: their arithmetic is exact or correctly rounded element by element, so every version
//! gives the same bits.

use super::{Isa, Real};
use crate::dump::Rows;
use crate::grid::Level;
use crate::hessian::rows::{pairs_body, single_body, top_body};
use crate::pack::{dense, marlin};

/// What rounding one column of a block of rows needs and leaves; all slices have one length.
pub(crate) struct Column<'a, T> {
    /// In: the updated weights. Out: the errors `w - q`.
    pub(crate) values: &'a mut [T],
    /// The original weights.
    pub(crate) original: &'a [f32],
    /// Scale per row.
    pub(crate) scale: &'a [f32],
    /// Zero point per row.
    pub(crate) zero: &'a [f32],
    /// Biased codes.
    pub(crate) codes: &'a mut [u8],
    /// Sum of `pivot * (updated - q)^2` per row.
    pub(crate) damped: &'a mut [f64],
    /// Sum of `(w - q)^2` per row.
    pub(crate) error: &'a mut [f64],
    /// `R_jj^2`.
    pub(crate) pivot: f64,
    /// Largest code.
    pub(crate) top: f64,
}

/// 2^52: adding it to a whole number below puts that number in the low bits.
const WHOLE: f64 = 4_503_599_627_370_496.0;

#[inline(always)]
fn column_body<T: Real>(c: Column<'_, T>) {
    let n = c.values.len();
    let (original, scale, zero) = (&c.original[..n], &c.scale[..n], &c.zero[..n]);
    let (codes, damped, error) = (&mut c.codes[..n], &mut c.damped[..n], &mut c.error[..n]);
    for i in 0..n {
        let updated = c.values[i].wide();
        let steps = (updated / f64::from(scale[i])).round_ties_even() + f64::from(zero[i]);
        let code = steps.max(0.0).min(c.top);
        codes[i] = (code + WHOLE).to_bits() as u8;
        let value = (code as f32 - zero[i]) * scale[i];
        let gap = updated - f64::from(value);
        let e = T::of(f64::from(original[i])) - T::of(f64::from(value));
        damped[i] += c.pivot * gap * gap;
        error[i] += e.wide() * e.wide();
        c.values[i] = e;
    }
}

#[inline(always)]
fn axpy_body<T: Real>(s: T, x: &[T], y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = s.fma(x, *y);
    }
}

#[inline(always)]
fn range_body<T: Real>(line: &[T], low: &mut [f64], high: &mut [f64]) {
    for ((&v, low), high) in line.iter().zip(low).zip(high) {
        *low = low.min(v.wide());
        *high = high.max(v.wide());
    }
}

/// Square errors of one column at one scale per lane, added to `costs`.
#[inline(always)]
fn cost_body<T: Real>(line: &[T], weight: f64, levels: &Lanes<'_>, top: f64, costs: &mut [f64]) {
    let n = line.len();
    let (scale, zero, costs) = (&levels.scale[..n], &levels.zero[..n], &mut costs[..n]);
    for i in 0..n {
        let value = line[i].wide();
        let steps = (value / f64::from(scale[i])).round_ties_even() + f64::from(zero[i]);
        let code = steps.max(0.0).min(top);
        let gap = value - f64::from((code as f32 - zero[i]) * scale[i]);
        costs[i] += weight * (gap * gap);
    }
}

/// Scale and zero point per lane.
pub(crate) struct Lanes<'a> {
    pub(crate) scale: &'a [f32],
    pub(crate) zero: &'a [f32],
}

macro_rules! versions {
    ($name:ident $(<$t:ident>)? => $body:path, ($($arg:ident: $of:ty),*) $(-> $out:ty)?) => {
        pub(crate) fn $name$(<$t: Real>)?(isa: Isa, $($arg: $of),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn narrow$(<$t: Real>)?($($arg: $of),*) $(-> $out)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
                fn wide$(<$t: Real>)?($($arg: $of),*) $(-> $out)? {
                    $body($($arg),*)
                }
                match isa.level() {
                    // SAFETY: `Isa` values above the portable one are made only after asking the machine.
                    2 => return unsafe { narrow($($arg),*) },
                    // SAFETY: as above.
                    3.. => return unsafe { wide($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
versions!(round_column<T> => column_body, (c: Column<'_, T>));
versions!(axpy<T> => axpy_body, (s: T, x: &[T], y: &mut [T]));
versions!(lane_range<T> => range_body, (line: &[T], low: &mut [f64], high: &mut [f64]));
versions!(lane_cost<T> => cost_body, (line: &[T], weight: f64, levels: &Lanes<'_>, top: f64, costs: &mut [f64]));

#[inline(always)]
fn row_body(values: &[f32], level: Level, top: u8, codes: &mut [u8]) {
    let (scale, zero, top) = (f64::from(level.scale), f64::from(level.zero), f64::from(top));
    for (code, &v) in codes.iter_mut().zip(values) {
        let steps = (f64::from(v) / scale).round_ties_even() + zero;
        *code = (steps.max(0.0).min(top) + WHOLE).to_bits() as u8;
    }
}

versions!(round_row => row_body, (values: &[f32], level: Level, top: u8, codes: &mut [u8]));
versions!(top_magnitude => top_body, (rows: Rows<'_>) -> u32);
versions!(pack_single => single_body, (rows: Rows<'_>, lanes: &mut [f32]));
versions!(pack_pairs => pairs_body, (rows: Rows<'_>, lanes: &mut [u32]));
versions!(pack_dense => dense::pack_body, (codes: &[u8], dim: usize, bits: u32, out: &mut [u32]));
versions!(unpack_dense => dense::unpack_body, (packed: &[u32], dim: usize, bits: u32, out: &mut [u8]));
versions!(pack_marlin => marlin::pack_body, (codes: &[u8], k: usize, out: &mut [u32]));
versions!(unpack_marlin => marlin::unpack_body, (packed: &[u32], k: usize, out: &mut [u8]));
