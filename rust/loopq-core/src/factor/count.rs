//! How many eigenvalues lie above a bound, at the price of one factor for each bound.
//!
//! By Sylvester's law of inertia `H - b I = A diag(p) A^T` has as many positive `p` as `H` has eigenvalues above `b`.
//! The factorisation is the one of the solvers with signed pivots. It exchanges no columns beyond an order found
//! beforehand, so a pivot near zero can spoil it. The product of the factors is therefore compared with `H`. The pivots
//! are those of a matrix `H + E`, which has the same count unless an eigenvalue lies within `|E|` of the bound. Where
//! `E` is not small in either of two orders, all eigenvalues are computed.

use crate::factor::lanczos::{largest_eigenvalue, scattered};
use crate::factor::ldl::Ldl;
use crate::factor::ordering::by_diagonal;
use crate::factor::{eigvalsh, Symmetric};
use crate::memory::collected;
use crate::simd::dot;
use crate::{Error, Execution, Result};

/// Largest error of a factorisation that is taken, relative to the largest eigenvalue. Of widths to 5280 it is 1e-15 to
/// 1e-11: the more eigenvalues lie on both sides of the bound, the nearer to zero is the smallest of the pivots.
const TOLERANCE: f64 = 1e-10;

/// Name of the working memory in errors.
const SCRATCH: &str = "a count of eigenvalues";

/// How many eigenvalues of a matrix are large.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// The largest eigenvalue.
    pub largest: f64,
    /// For each fraction the number of eigenvalues above that fraction of the largest.
    pub above: Vec<usize>,
}

/// Counts the eigenvalues of a positive semi-definite `H` above fractions of the largest one, in double precision.
/// Reads the upper triangle.
pub fn count_above(h: Symmetric<'_>, fractions: &[f64], execution: &Execution<'_>) -> Result<Counts> {
    h.check_finite()?;
    if let Some(bad) = fractions.iter().find(|f| !(**f >= 0.0 && **f < 1.0)) {
        return Err(Error::setting("fraction of the largest eigenvalue", bad, "0 or more and below 1"));
    }
    if (0..h.dim()).all(|j| h.at(j, j) == 0.0) {
        return Ok(Counts { largest: 0.0, above: vec![0; fractions.len()] });
    }
    let largest = largest_eigenvalue(h, execution)?;
    let above = fractions.iter().map(|fraction| count(h, fraction * largest, largest, execution));
    Ok(Counts { largest, above: above.collect::<Result<_>>()? })
}

fn count(h: Symmetric<'_>, bound: f64, largest: f64, execution: &Execution<'_>) -> Result<usize> {
    let shift: Vec<f64> = collected(SCRATCH, (0..h.dim()).map(|_| -bound))?;
    // The last place is eliminated first: large diagonal entries come before those that the shift makes small. Another
    // order has other pivots.
    let mut rising = by_diagonal(h, &shift)?;
    rising.reverse();
    for order in [rising, collected(SCRATCH, 0..h.dim())?] {
        if let Some(factor) = Ldl::signed(h, &shift, &order, execution)? {
            if error(h, bound, &factor, &order, execution)? <= TOLERANCE * largest {
                return Ok(factor.pivots.iter().filter(|&&p| p > 0.0).count());
            }
        }
    }
    Ok(eigvalsh(h, execution)?.iter().filter(|&&value| value > bound).count())
}

/// The length of `E x` over that of `x / sqrt(dim)`, `E` what the factor is off by and `x` without a pattern: an
/// estimate of the Frobenius norm of `E`.
fn error(
    h: Symmetric<'_>,
    bound: f64,
    factor: &Ldl<f64>,
    order: &[usize],
    execution: &Execution<'_>,
) -> Result<f64> {
    let x = scattered(h.dim())?;
    let product = h.times(&x, execution)?;
    let by_place: Vec<f64> = collected(SCRATCH, order.iter().map(|&j| x[j]))?;
    let found = factor.times(&by_place)?;
    let off = order.iter().zip(&found).map(|(&j, value)| product[j] - bound * x[j] - value);
    let off: Vec<f64> = collected(SCRATCH, off)?;
    Ok((dot(&off, &off) / dot(&x, &x) * h.dim() as f64).sqrt())
}
