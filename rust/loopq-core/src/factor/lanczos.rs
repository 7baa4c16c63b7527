//! The largest eigenvalue, by the Lanczos iteration with every vector kept orthogonal to all before it (G. Golub and C.
//! Van Loan, *Matrix Computations*, 4th ed., sections 10.1 and 10.3).
//!
//! After `k` products with `H`, the largest eigenvalue of a `k` x `k` tridiagonal matrix approximates that of `H`. With
//! `s` its eigenvector, it is within `beta_k |s_k|` of an eigenvalue, and in practice within the square of that.

use crate::factor::Symmetric;
use crate::memory::collected;
use crate::simd::dot;
use crate::{Execution, Result};

/// `beta_k |s_k|` at which the iteration ends, relative to the eigenvalue.
const TOLERANCE: f64 = 1e-10;

/// The largest eigenvalue of a positive semi-definite matrix without NaN or infinity, 1 or more columns wide.
pub(super) fn largest_eigenvalue(h: Symmetric<'_>, execution: &Execution<'_>) -> Result<f64> {
    let mut basis = vec![unit(scattered(h.dim())?).1];
    let (mut alphas, mut betas) = (Vec::new(), Vec::new());
    loop {
        let newest = &basis[basis.len() - 1];
        let mut product = h.times(newest, execution)?;
        alphas.push(dot(newest, &product));
        // Twice: the first pass leaves rounding errors of the size of what it took away.
        for earlier in basis.iter().chain(&basis) {
            let share = dot(earlier, &product);
            product.iter_mut().zip(earlier).for_each(|(value, e)| *value -= share * e);
        }
        let (beta, next) = unit(product);
        let (top, last) = top_pair(&alphas, &betas);
        if beta * last <= TOLERANCE * top || basis.len() == h.dim() {
            return Ok(top);
        }
        betas.push(beta);
        basis.push(next);
    }
}

/// Numbers without a pattern, the same every time: no eigenvector is nearly orthogonal to them but by bad luck.
pub(super) fn scattered(n: usize) -> Result<Vec<f64>> {
    let mut state = 0_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    collected("a vector of random numbers", (0..n).map(|_| next()))
}

/// A vector's length, and the vector over it.
fn unit(mut x: Vec<f64>) -> (f64, Vec<f64>) {
    let length = dot(&x, &x).sqrt();
    for value in &mut x {
        *value /= length;
    }
    (length, x)
}

/// The largest eigenvalue of the tridiagonal matrix, and the last entry of its unit eigenvector.
fn top_pair(alphas: &[f64], betas: &[f64]) -> (f64, f64) {
    let n = alphas.len();
    let beside = |i: usize| if i < betas.len() { betas[i] } else { 0.0 };
    let before = |i: usize| if i > 0 { betas[i - 1] } else { 0.0 };
    // Gershgorin's bound; no eigenvalue is below the largest diagonal entry at the same time.
    let mut high = (0..n).map(|i| alphas[i] + beside(i) + before(i)).fold(f64::MIN, f64::max);
    let mut low = alphas.iter().copied().fold(f64::MIN, f64::max);
    loop {
        let middle = low + (high - low) / 2.0;
        // Written so that NaN ends it too.
        if !(middle > low && middle < high) {
            break;
        }
        // All pivots of T - x I are negative exactly where x is above every eigenvalue.
        let mut pivot = -1.0;
        let above = (0..n).all(|i| {
            pivot = alphas[i] - middle - before(i) * before(i) / pivot;
            pivot < 0.0
        });
        if above {
            high = middle;
        } else {
            low = middle;
        }
    }
    // Run from the last entry up: entries grow in this direction once the eigenvalue has settled.
    let (mut after, mut entry, mut squares) = (0.0, 1.0, 1.0);
    for i in (1..n).rev() {
        let up = ((high - alphas[i]) * entry - beside(i) * after) / betas[i - 1];
        (after, entry) = (entry, up);
        squares += up * up;
    }
    (high, 1.0 / f64::sqrt(squares))
}
