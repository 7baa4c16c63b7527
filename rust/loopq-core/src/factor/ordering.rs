//! In which order columns are rounded.
//!
//! A column that is rounded early has the most others left to make up for its error. Its cost then is its *conditional
//! energy*: `1 / [(S_F)^-1]_jj` with `F` the columns not rounded yet. The rule takes the largest of these first, while
//! everything else can still compensate, and asks again among those that remain. Groups keep their columns and have
//! their scales beforehand, so nothing about the order is stored.

use rayon::prelude::*;

use crate::factor::Symmetric;
use crate::memory::Buffer;
use crate::simd::dot;
use crate::{dims, Error, Execution, Result};

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
/// A Cholesky factorisation of `S^-1` with pivoting (Golub and Van Loan, *Matrix Computations*, section 4.2), but with
/// the *smallest* remaining diagonal as the next pivot: after the columns of a set have been taken, what is left of the
/// diagonal is that of `(S_F)^-1`, `F` the columns that remain.
pub(super) fn by_conditional_energy(
    inverse: &[f64],
    dim: usize,
    execution: &Execution<'_>,
) -> Result<Vec<usize>> {
    let mut left: Vec<usize> = (0..dim).collect();
    let mut diagonal: Vec<f64> = (0..dim).map(|j| inverse[j * dim + j]).collect();
    // Row k holds what the pivots so far took from column k of the inverse.
    let size = dims::product("the pivoted factor of an inverse", dim, dim)?;
    let mut taken = Buffer::zeroed("the pivoted factor of an inverse", size)?;
    let mut order = Vec::with_capacity(dim);
    let pool = execution.pool()?;
    for step in 0..dim {
        execution.check()?;
        let Some(at) = (0..left.len())
            .min_by(|&a, &b| diagonal[left[a]].total_cmp(&diagonal[left[b]]).then(left[a].cmp(&left[b])))
        else {
            break;
        };
        let j = left.swap_remove(at);
        order.push(j);
        let root = diagonal[j].max(f64::MIN_POSITIVE).sqrt();
        let own = taken[j * dim..j * dim + step].to_vec();
        let next: Vec<f64> = pool.install(|| {
            left.par_iter()
                .with_min_len(64)
                .map(|&k| {
                    let sum: f64 = dot(&taken[k * dim..k * dim + step], &own);
                    (inverse[j * dim + k] - sum) / root
                })
                .collect()
        });
        for (&k, value) in left.iter().zip(next) {
            taken[k * dim + step] = value;
            diagonal[k] -= value * value;
        }
    }
    Ok(order)
}

/// Columns by falling diagonal of `S = H + diag(mu)`, ties by falling diagonal of `H`, then by ascending index.
pub(super) fn by_diagonal(h: Symmetric<'_>, mu: &[f64]) -> Vec<usize> {
    let own = |j: usize| h.at(j, j);
    let mut order: Vec<usize> = (0..h.dim()).collect();
    order.sort_by(|&i, &j| {
        let falling = (own(j) + mu[j]).total_cmp(&(own(i) + mu[i]));
        falling.then(own(j).total_cmp(&own(i))).then(i.cmp(&j))
    });
    order
}
