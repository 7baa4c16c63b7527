//! The damped Hessian that solvers share: `S = H + diag(mu)`, its columns in an order, factored.

use std::sync::OnceLock;

use rayon::prelude::*;

use crate::factor::ldl::Ldl;
use crate::factor::ordering::{by_conditional_energy, by_diagonal};
use crate::factor::{Order, Symmetric};
use crate::lanes::{columns_of, Lane, LANES};
use crate::memory::{collected, copied, zeros, Buffer};
use crate::simd::{add_rows, Isa, Real};
use crate::weight::Weight;
use crate::{dims, Error, Execution, Result};

/// Name of asymmetric calibration's memory in errors.
const SHIFT: &str = "the shifted weight";

/// `S = H + diag(mu)` factored in an order, made once for all layers with the same input.
///
/// Parts that only some solvers need are made on demand: see [`DampedHessian`].
#[derive(Debug)]
pub struct DampedFactor<T> {
    ldl: Ldl<T>,
    rule: Order,
    order: Vec<usize>,
    mu: Vec<f64>,
    n_dead_columns: usize,
    /// Of the `H` that it was made of.
    fingerprint: u64,
    matrix: OnceLock<Buffer<f64>>,
}

impl<T: Real> DampedFactor<T> {
    /// Damps, orders and factors `H`; `mu` is added to its diagonal.
    pub fn new(h: Symmetric<'_>, mu: &[f64], rule: Order, execution: &Execution<'_>) -> Result<Self> {
        let dim = h.dim();
        check(h, mu)?;
        let natural = collected("an order of columns", 0..dim)?;
        let order = match rule {
            Order::Natural => natural,
            Order::Diagonal => by_diagonal(h, mu)?,
            Order::Conditional => {
                let inverse = Ldl::<f64>::new(h, mu, &natural, execution)?.inverse(execution)?;
                by_conditional_energy(inverse, dim, execution)?
            }
        };
        let ldl = Ldl::new(h, mu, &order, execution)?;
        let n_dead_columns = (0..dim).filter(|&j| h.at(j, j) == 0.0).count();
        let (mu, fingerprint, matrix) =
            (copied("the damping of a Hessian", mu)?, h.fingerprint(), OnceLock::new());
        Ok(Self { ldl, rule, order, mu, n_dead_columns, fingerprint, matrix })
    }

    /// Columns.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.order.len()
    }

    /// The rule by which the order was found.
    #[must_use]
    pub fn rule(&self) -> Order {
        self.rule
    }

    /// The column of `H` at each place of the order.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The damping on the diagonal of `H`.
    #[must_use]
    pub fn mu(&self) -> &[f64] {
        &self.mu
    }

    /// Number of columns of `H` with a zero on the diagonal.
    #[must_use]
    pub fn n_dead_columns(&self) -> usize {
        self.n_dead_columns
    }

    /// `R_jj^2` by place of the order: the cost of a unit error in a column after the later columns have compensated
    /// it.
    #[must_use]
    pub fn pivots(&self) -> &[f64] {
        &self.ldl.pivots
    }

    /// The lines of `A` from place `(i, j)` to the end of `j`'s panel, [`super::PANEL_WIDTH`] apart.
    #[inline]
    pub(crate) fn lines(&self, i: usize, j: usize) -> &[T] {
        self.ldl.a.lines(i, j)
    }

    /// Entry of `A` at place `(i, j)`, `i < j`.
    #[inline]
    pub(crate) fn entry(&self, i: usize, j: usize) -> T {
        self.ldl.a.at(i, j)
    }
}

impl DampedFactor<f64> {
    /// The target of asymmetric calibration, `W (I + alpha C S^-1)`. On the inputs that the layer will receive, it
    /// comes nearest to the layer's output on the inputs of the original model. `C = sum (X - X^)^T X^`.
    pub fn shift(
        &self,
        w: Weight<'_>,
        cross: &[f64],
        alpha: f64,
        execution: &Execution<'_>,
    ) -> Result<Vec<f32>> {
        let dim = self.dim();
        w.check_width(dim)?;
        dims::check_matrix("C", cross, dim, dim)?;
        if let Some(at) = cross.iter().position(|v| !v.is_finite()) {
            let value = crate::error::name_of(cross[at]);
            return Err(Error::NonFiniteMatrix { what: "C", row: at / dim, column: at % dim, value });
        }
        if !alpha.is_finite() {
            return Err(Error::setting("alpha", alpha, "a finite number"));
        }
        let mut out = zeros(SHIFT, dims::product("W", w.rows(), dim)?)?;
        execution.pool()?.install(|| {
            out.par_chunks_mut(dim * LANES).enumerate().try_for_each(|(tile, out)| {
                execution.check()?;
                let lanes = columns_of(w, tile * LANES)?;
                let shift = self.divide(&product(&lanes, cross)?)?;
                for (r, row) in out.chunks_exact_mut(dim).enumerate() {
                    for (j, to) in row.iter_mut().enumerate() {
                        *to = (lanes[j][r] + alpha * shift[j][r]) as f32;
                    }
                }
                Ok(())
            })
        })?;
        Ok(out)
    }

    /// `b S^-1` for every lane, by column of `H`.
    pub(crate) fn divide(&self, b: &[Lane]) -> Result<Vec<Lane>> {
        let mut x: Vec<Lane> = collected(SHIFT, self.order.iter().map(|&j| b[j]))?;
        self.ldl.solve(&mut x);
        let mut out: Vec<Lane> = zeros(SHIFT, x.len())?;
        for (lane, &j) in x.iter().zip(&self.order) {
            out[j] = *lane;
        }
        Ok(out)
    }
}

/// `w C` for every lane, `C` row-major and square.
fn product(w: &[Lane], cross: &[f64]) -> Result<Vec<Lane>> {
    let mut out = zeros(SHIFT, w.len())?;
    let rows: Vec<&[f64]> = collected(SHIFT, cross.chunks_exact(w.len()))?;
    add_rows(Isa::best(), &mut out, &rows, w);
    Ok(out)
}

/// A damped Hessian with the matrix that its factor was made of: what solvers need that change codes one by one.
#[derive(Clone, Copy, Debug)]
pub struct DampedHessian<'a> {
    h: Symmetric<'a>,
    factor: &'a DampedFactor<f64>,
}

impl<'a> DampedHessian<'a> {
    /// Puts a factor and its `H` together.
    pub fn new(h: Symmetric<'a>, factor: &'a DampedFactor<f64>) -> Result<Self> {
        if h.dim() != factor.dim() {
            return Err(Error::shape("H", factor.dim(), h.dim()));
        }
        Ok(Self { h, factor })
    }

    /// Refuses an `H` that is not the one that was factored.
    fn check_same(&self) -> Result<()> {
        if self.h.fingerprint() == self.factor.fingerprint {
            return Ok(());
        }
        Err(Error::ChangedHessian)
    }

    /// The factor.
    pub(crate) fn factor(&self) -> &'a DampedFactor<f64> {
        self.factor
    }

    /// `S`, full; formed at the first call for a factor.
    pub(crate) fn matrix(&self) -> Result<Square<'a>> {
        let (cell, dim) = (&self.factor.matrix, self.h.dim());
        // Rows a multiple of 1 KiB apart would meet in few sets of the first-level cache.
        let stride = if dim.is_multiple_of(128) { dim + 64 } else { dim };
        if let Some(found) = cell.get() {
            return Ok(Square { values: found, dim, stride });
        }
        self.check_same()?;
        let mut s = Buffer::zeroed("a damped Hessian", dims::product("S", dim, stride)?)?;
        for i in 0..dim {
            s[i * stride + i] = self.h.at(i, i) + self.factor.mu[i];
            for j in i + 1..dim {
                let value = self.h.at(i, j);
                s[i * stride + j] = value;
                s[j * stride + i] = value;
            }
        }
        Ok(Square { values: cell.get_or_init(|| s), dim, stride })
    }
}

/// A symmetric matrix with all its entries.
#[derive(Clone, Copy)]
pub(crate) struct Square<'a> {
    values: &'a [f64],
    dim: usize,
    stride: usize,
}

impl<'a> Square<'a> {
    pub(crate) fn row(&self, i: usize) -> &'a [f64] {
        &self.values[i * self.stride..][..self.dim]
    }

    pub(crate) fn at(&self, i: usize, j: usize) -> f64 {
        self.row(i)[j]
    }
}

/// Refuses what cannot be damped and factored.
fn check(h: Symmetric<'_>, mu: &[f64]) -> Result<()> {
    let dim = h.dim();
    if dim == 0 {
        return Err(Error::shape("H", "1 or more columns", 0));
    }
    h.check_finite()?;
    if mu.len() != dim {
        return Err(Error::shape("mu", dim, mu.len()));
    }
    if let Some(bad) = mu.iter().find(|v| !v.is_finite() || **v < 0.0) {
        return Err(Error::setting("mu", bad, "finite numbers of 0 or more"));
    }
    if (0..dim).all(|j| h.at(j, j) + mu[j] == 0.0) {
        return Err(Error::ZeroHessian);
    }
    Ok(())
}
