//! `y += s x` and sums of products, for work too small for the tile.

use super::{per_isa, Real};

#[inline(always)]
fn body<T: Real>(s: T, x: &[T], y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = s.fma(x, *y);
    }
}

per_isa! {
    /// Adds `s * x` to `y`, one fused multiply-add per entry.
    pub(crate) fn axpy<T: Real>(s: T, x: &[T], y: &mut [T]) = body;
}

/// Sum of products in four fixed partial sums: a plain chain cannot be vectorised, and any other split would tie the
/// bits to the machine.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (heads, tail) = (a.len() / 4 * 4, a.len() % 4);
    for (x, y) in a[..heads].chunks_exact(4).zip(b[..heads].chunks_exact(4)) {
        for i in 0..4 {
            sums[i] += x[i] * y[i];
        }
    }
    for i in 0..tail {
        sums[i] += a[heads + i] * b[heads + i];
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}
