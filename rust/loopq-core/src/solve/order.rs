//! In which order columns are rounded.
//!
//! A column that is rounded early has the most others left to make up for its error. Its cost then is its *conditional
//! energy*: `1 / [(S_F)^-1]_jj` with `F` the columns not rounded yet. The rule takes the largest of these first, while
//! everything else can still compensate, and asks again among those that remain. Groups keep their columns and have
//! their scales beforehand, so nothing about the order is stored.

use rayon::prelude::*;

use crate::pool::pool;
use crate::{Error, Result, Watch};

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

/// `S^-1` from `S = A diag(p) A^T`, `A` unit upper triangular: `sum_i b_i b_i^T / p_i` with `b_i` the rows of `A^-1`.
pub(crate) fn inverse(a: &[f64], pivots: &[f64], threads: usize, watch: &Watch) -> Result<Vec<f64>> {
    let dim = pivots.len();
    let mut rows = vec![0.0; dim * dim];
    let mut out = vec![0.0; dim * dim];
    pool(threads)?.install(|| -> Result<()> {
        rows.par_chunks_mut(dim).enumerate().try_for_each(|(i, b)| {
            watch.check()?;
            b[i] = 1.0;
            for l in i..dim {
                let f = -b[l];
                for (to, entry) in b[l + 1..].iter_mut().zip(&a[l * dim + l + 1..]) {
                    *to += f * entry;
                }
            }
            Ok(())
        })?;
        out.par_chunks_mut(dim).enumerate().try_for_each(|(j, p)| {
            watch.check()?;
            for i in 0..=j {
                let f = rows[i * dim + j] / pivots[i];
                for (to, b) in p[i..].iter_mut().zip(&rows[i * dim + i..(i + 1) * dim]) {
                    *to += f * b;
                }
            }
            Ok(())
        })
    })?;
    Ok(out)
}

/// The order by falling conditional energy, ties by ascending index: a Cholesky factorisation of `S^-1` that takes
/// the smallest remaining diagonal as its next pivot.
pub(crate) fn by_conditional_energy(
    inverse: &[f64],
    dim: usize,
    threads: usize,
    watch: &Watch,
) -> Result<Vec<usize>> {
    let mut left: Vec<usize> = (0..dim).collect();
    let mut diagonal: Vec<f64> = (0..dim).map(|j| inverse[j * dim + j]).collect();
    // Row k holds what the pivots so far took from column k of the inverse.
    let mut taken = vec![0.0; dim * dim];
    let mut order = Vec::with_capacity(dim);
    let pool = pool(threads)?;
    for step in 0..dim {
        watch.check()?;
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

/// Sum of products in four fixed partial sums: a plain chain cannot be vectorised, and any other split would tie the
/// bits to the machine.
fn dot(a: &[f64], b: &[f64]) -> f64 {
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

/// Columns by descending diagonal, ties by ascending index.
pub(crate) fn by_diagonal(s: &[f64], dim: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..dim).collect();
    order.sort_by(|&i, &j| s[j * dim + j].total_cmp(&s[i * dim + i]).then(i.cmp(&j)));
    order
}
