//! `S = A diag(p) A^T`, `A` unit upper triangular, of a damped Hessian with its columns in some order.

use rayon::prelude::*;

use crate::factor::cholesky::{factor_in_place, Pivots, Stop};
use crate::factor::panels::{Panels, PANEL_WIDTH};
use crate::factor::Symmetric;
use crate::lanes::{Lane, LANES};
use crate::memory::{collected, copied, zeros};
use crate::simd::{add_rows, dot, Isa, Real};
use crate::{Error, Execution, Result};

/// `A` and `p`; row and column `i` stand for column `order[i]` of `H`.
#[derive(Debug)]
pub(super) struct Ldl<T> {
    /// Entries above the diagonal.
    pub(super) a: Panels<T>,
    pub(super) pivots: Vec<f64>,
}

impl<T: Real> Ldl<T> {
    /// Factors `S = H + diag(mu)`.
    pub(super) fn new(
        h: Symmetric<'_>,
        mu: &[f64],
        order: &[usize],
        execution: &Execution<'_>,
    ) -> Result<Self> {
        Self::factored(h, mu, order, Pivots::Positive, execution).map_err(|stop| match stop {
            Stop::Refused(error) => error,
            Stop::Pivot(at, value) => {
                let (column, dim) = (order[at], h.dim());
                let (diagonal, mu) = (h.at(column, column), mu[column]);
                Error::NotPositive { column, dim, value, diagonal, mu, precision: T::NAME }
            }
        })
    }

    /// The same with pivots of either sign; `None` where one is zero.
    pub(super) fn signed(
        h: Symmetric<'_>,
        mu: &[f64],
        order: &[usize],
        execution: &Execution<'_>,
    ) -> Result<Option<Self>> {
        match Self::factored(h, mu, order, Pivots::Signed, execution) {
            Ok(made) => Ok(Some(made)),
            Err(Stop::Pivot(..)) => Ok(None),
            Err(Stop::Refused(error)) => Err(error),
        }
    }

    fn factored(
        h: Symmetric<'_>,
        mu: &[f64],
        order: &[usize],
        allowed: Pivots,
        execution: &Execution<'_>,
    ) -> std::result::Result<Self, Stop> {
        let dim = h.dim();
        let pool = execution.pool()?;
        let mut made = Self { a: Panels::zeros(dim)?, pivots: zeros("pivots of a Hessian", dim)? };
        pool.install(|| {
            made.load(h, mu, order);
            factor_in_place(&mut made.a, &mut made.pivots, allowed, execution)
        })?;
        Ok(made)
    }

    /// Copies the upper triangle of `S`.
    fn load(&mut self, h: Symmetric<'_>, mu: &[f64], order: &[usize]) {
        let dim = h.dim();
        self.a.panels.par_iter_mut().with_max_len(1).enumerate().for_each(|(p, panel)| {
            for (i, line) in panel.chunks_exact_mut(PANEL_WIDTH).enumerate() {
                let from = order[i];
                for (c, entry) in line.iter_mut().enumerate() {
                    let j = p * PANEL_WIDTH + c;
                    if j < i || j >= dim {
                        continue;
                    }
                    let value = h.at(from, order[j]);
                    *entry = T::of(if i == j { value + mu[from] } else { value });
                }
            }
        });
    }
}

impl Ldl<f64> {
    /// `S x`, as the factor has it; `x` by place.
    pub(super) fn times(&self, x: &[f64]) -> Result<Vec<f64>> {
        let what = "a product with a factor";
        let mut turned = copied(what, x)?;
        for i in 0..self.a.dim {
            for (from, piece) in self.a.right_of_diagonal(i) {
                for (to, entry) in turned[from..].iter_mut().zip(piece) {
                    *to += entry * x[i];
                }
            }
        }
        turned.iter_mut().zip(&self.pivots).for_each(|(value, pivot)| *value *= pivot);
        let rest = |i: usize| self.a.right_of_diagonal(i).map(|(from, piece)| dot(piece, &turned[from..]));
        collected(what, (0..self.a.dim).map(|i| turned[i] + rest(i).sum::<f64>()))
    }

    /// Turns `x` into `x S^-1`, one row per lane.
    pub(super) fn solve(&self, x: &mut [Lane]) {
        let (dim, isa) = (self.a.dim, Isa::best());
        for i in (0..dim).rev() {
            let mut sum = [0.0; LANES];
            for (from, piece) in self.a.right_of_diagonal(i) {
                for (f, later) in piece.iter().zip(&x[from..]) {
                    for r in 0..LANES {
                        sum[r] += f * later[r];
                    }
                }
            }
            for r in 0..LANES {
                x[i][r] -= sum[r];
            }
        }
        for (lane, pivot) in x.iter_mut().zip(&self.pivots) {
            for value in lane {
                *value /= pivot;
            }
        }
        for i in 0..dim {
            let by = x[i].map(|v| -v);
            for (from, piece) in self.a.right_of_diagonal(i) {
                add_rows(isa, &mut x[from..from + piece.len()], &[piece], &[by]);
            }
        }
    }
}
