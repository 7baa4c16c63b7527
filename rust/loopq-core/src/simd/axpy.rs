//! `y += s x`, the step that the tile is too large for.

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
