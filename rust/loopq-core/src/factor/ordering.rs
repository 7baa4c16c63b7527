//! In which order columns are rounded.
//!
//! A column that is rounded early has the most others left to make up for its error. Its cost then is its *conditional
//! energy*: `1 / [(S_F)^-1]_jj` with `F` the columns not rounded yet. The rule takes the largest of these first, while
//! everything else can still compensate, and asks again among those that remain. Groups keep their columns and have
//! their scales beforehand, so nothing about the order is stored.

use rayon::prelude::*;

use crate::factor::Symmetric;
use crate::memory::{collected, zeros, Buffer};
use crate::simd::{axpy, Isa, Real, MR};
use crate::{Error, Execution, Result};

/// Pivots that are found before their rows are subtracted from all others.
pub const PIVOTS: usize = 64;

const NR: usize = <f64 as Real>::NR;

/// A rule for the order of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they lie in the weight.
    Natural,
    /// By descending diagonal of `S`.
    Diagonal,
    /// By descending conditional energy among the columns that remain.
    Conditional,
}

impl Order {
    /// The rule with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "natural" => Ok(Self::Natural),
            "diagonal" => Ok(Self::Diagonal),
            "conditional" => Ok(Self::Conditional),
            _ => Err(Error::setting("order", format!("{name:?}"), "'natural', 'diagonal', 'conditional'")),
        }
    }
}

/// The order by falling conditional energy, ties by ascending index.
///
/// This is a Cholesky factorisation of `S^-1` with pivoting (Golub and Van Loan, *Matrix Computations*, section 4.2),
/// but with the *smallest* remaining diagonal as the next pivot. After some columns have been taken, the remaining
/// diagonal is that of `(S_F)^-1`, `F` the columns that remain. `inverse` is the lower triangle of `S^-1`, row-major.
/// It is updated in place, with columns exchanged as they are taken; a block of pivots is subtracted at once.
pub(super) fn by_conditional_energy(
    mut inverse: Buffer<f64>,
    dim: usize,
    execution: &Execution<'_>,
) -> Result<Vec<usize>> {
    let isa = Isa::best();
    let mut order: Vec<usize> = collected("an order of columns", 0..dim)?;
    let mut diagonal: Vec<f64> = collected("a diagonal", (0..dim).map(|j| inverse[j * dim + j]))?;
    // Rows of the factor of this block, from the place of their pivot on; and times -1, once for all products with them.
    let (width, what) = (dim.next_multiple_of(NR) + NR, "rows of the pivoted factor of an inverse");
    let (mut block, mut negative) = (zeros(what, PIVOTS * width)?, zeros(what, PIVOTS * width)?);
    let pool = execution.pool()?;
    for first in (0..dim).step_by(PIVOTS) {
        execution.check()?;
        let n = PIVOTS.min(dim - first);
        block.fill(0.0);
        for step in 0..n {
            let place = first + step;
            let least =
                |&a: &usize, &b: &usize| diagonal[a].total_cmp(&diagonal[b]).then(order[a].cmp(&order[b]));
            let pivot = (place..dim).min_by(least).unwrap_or(place);
            exchange(&mut inverse, dim, place, pivot);
            diagonal.swap(place, pivot);
            order.swap(place, pivot);
            let (before, own) = block.split_at_mut(step * width);
            let row = &mut own[..dim];
            for line in before.chunks_exact_mut(width) {
                line.swap(place, pivot);
            }
            for k in place + 1..dim {
                row[k] = inverse[k * dim + place];
            }
            for line in before.chunks_exact(width) {
                axpy(isa, -line[place], &line[place + 1..dim], &mut row[place + 1..dim]);
            }
            let root = diagonal[place].max(f64::MIN_POSITIVE).sqrt();
            for k in place + 1..dim {
                row[k] /= root;
                diagonal[k] -= row[k] * row[k];
            }
        }
        negative.iter_mut().zip(&block).for_each(|(to, v)| *to = -v);
        pool.install(|| subtract(isa, &mut inverse, dim, first + n, (&negative, &block), (n, width)));
    }
    Ok(order)
}

/// Exchanges two places, `a <= b`, of a symmetric matrix of which the lower triangle is kept, as far as the columns from `a`
/// on go.
fn exchange(matrix: &mut [f64], dim: usize, a: usize, b: usize) {
    if a == b {
        return;
    }
    matrix.swap(a * dim + a, b * dim + b);
    for k in a + 1..b {
        matrix.swap(k * dim + a, b * dim + k);
    }
    for k in b + 1..dim {
        matrix.swap(k * dim + a, k * dim + b);
    }
}

/// Takes `sum_t block[t] block[t]^T` over `n` lines of `width` from the lower triangle from place `first` on; `negative`
/// is `-block`.
fn subtract(
    isa: Isa,
    matrix: &mut [f64],
    dim: usize,
    first: usize,
    (negative, block): (&[f64], &[f64]),
    (n, width): (usize, usize),
) {
    matrix[first * dim..].par_chunks_mut(MR * dim).with_min_len(8).enumerate().for_each(|(tile, rows)| {
        let row = first + tile * MR;
        for column in (first..(row + MR).min(dim)).step_by(NR) {
            let (height, length) = (rows.len() / dim, NR.min(dim - column));
            let (a, b) = (&negative[row..], &block[column..]);
            if height == MR && length == NR {
                f64::tile(isa, n, a, width, b, width, &mut rows[column..], dim);
                continue;
            }
            let mut edge = [0.0; MR * NR];
            for (to, from) in edge.chunks_exact_mut(NR).zip(rows.chunks_exact(dim)) {
                to[..length].copy_from_slice(&from[column..column + length]);
            }
            f64::tile(isa, n, a, width, b, width, &mut edge, NR);
            for (from, to) in edge.chunks_exact(NR).zip(rows.chunks_exact_mut(dim)) {
                to[column..column + length].copy_from_slice(&from[..length]);
            }
        }
    });
}

/// Columns by falling diagonal of `S = H + diag(mu)`, ties by falling diagonal of `H`, then by ascending index.
pub(super) fn by_diagonal(h: Symmetric<'_>, mu: &[f64]) -> Result<Vec<usize>> {
    let own = |j: usize| h.at(j, j);
    let mut order: Vec<usize> = collected("an order of columns", 0..h.dim())?;
    // Indices break every tie, so that a sort without scratch memory gives the same.
    order.sort_unstable_by(|&i, &j| {
        let falling = (own(j) + mu[j]).total_cmp(&(own(i) + mu[i]));
        falling.then(own(j).total_cmp(&own(i))).then(i.cmp(&j))
    });
    Ok(order)
}
