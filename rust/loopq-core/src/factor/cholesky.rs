//! Reversed Cholesky: `H + mu I = R R^T`, `R` upper triangular.

use crate::factor::Symmetric;
use crate::simd::Real;
use crate::{Error, Result, Watch};

/// `A = R diag(R)^-1` and the pivots `diag(R)^2` of a damped Hessian.
#[derive(Clone, Debug)]
pub struct Factor<T> {
    pub(crate) dim: usize,
    /// Row-major; entries above the diagonal are `A`, the others are not meant to be read.
    pub(crate) a: Vec<T>,
    pub(crate) pivots: Vec<f64>,
    /// Position in the factor -> column of `H`; empty for the identity.
    pub(crate) order: Vec<usize>,
    /// `mu`.
    pub damping_abs: f64,
    /// Columns of `H` whose diagonal is zero.
    pub n_dead_columns: usize,
}

impl<T: Real> Factor<T> {
    /// Factors `H + damping * mean(diag H) * I`.
    ///
    /// `act_order` takes the columns by descending diagonal (ties by ascending index).
    pub fn new(
        h: Symmetric<'_>,
        dim: usize,
        damping: f64,
        act_order: bool,
        _threads: usize,
        watch: &Watch,
    ) -> Result<Self> {
        if !damping.is_finite() || damping < 0.0 {
            return Err(Error::setting(
                "damping",
                damping,
                "0 or more, finite (a fraction of the mean diagonal)",
            ));
        }
        if dim == 0 {
            return Err(Error::shape("H", "1 or more columns", 0));
        }
        h.check(dim)?;
        let diagonal = h.diagonal(dim);
        let mean = diagonal.iter().sum::<f64>() / dim as f64;
        if diagonal.iter().all(|&v| v == 0.0) {
            return Err(Error::ZeroHessian);
        }
        let damping_abs = damping * mean;
        let order = if act_order {
            descending(&diagonal)
        } else {
            Vec::new()
        };
        let mut a = vec![T::default(); dim * dim];
        for i in 0..dim {
            let from = order.get(i).copied().unwrap_or(i);
            for j in i..dim {
                let to = order.get(j).copied().unwrap_or(j);
                // The upper triangle is what counts, also when the order swaps a pair.
                a[i * dim + j] = T::of(h.at(from.min(to) * dim + from.max(to)));
            }
            a[i * dim + i] = T::of(diagonal[from] + damping_abs);
        }
        let n_dead_columns = diagonal.iter().filter(|&&v| v == 0.0).count();
        let mut made = Self {
            dim,
            a,
            pivots: vec![0.0; dim],
            order,
            damping_abs,
            n_dead_columns,
        };
        made.factor(damping, watch)?;
        Ok(made)
    }

    fn factor(&mut self, damping: f64, watch: &Watch) -> Result<()> {
        let dim = self.dim;
        for j in (0..dim).rev() {
            watch.check()?;
            let mut pivot = self.a[j * dim + j];
            for k in (j + 1..dim).rev() {
                let r = self.a[j * dim + k];
                pivot = (-r).fma(r, pivot);
            }
            // Written so that NaN fails too.
            if !(pivot > T::default() && pivot.wide().is_finite()) {
                return Err(Error::NotPositive {
                    column: self.order.get(j).copied().unwrap_or(j),
                    dim,
                    value: pivot.wide(),
                    damping,
                    precision: T::NAME,
                });
            }
            let root = pivot.root();
            self.a[j * dim + j] = root;
            self.pivots[j] = pivot.wide();
            for i in 0..j {
                let mut sum = self.a[i * dim + j];
                for k in (j + 1..dim).rev() {
                    sum = (-self.a[i * dim + k]).fma(self.a[j * dim + k], sum);
                }
                self.a[i * dim + j] = sum / root;
            }
        }
        for i in 0..dim {
            for j in i + 1..dim {
                let root = self.a[j * dim + j];
                self.a[i * dim + j] = self.a[i * dim + j] / root;
            }
        }
        Ok(())
    }

    /// Columns.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// `R_jj^2` in the factor's order.
    #[must_use]
    pub fn pivots(&self) -> &[f64] {
        &self.pivots
    }

    /// Column of `H` at each position of the factor; empty when they are the same.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The smallest pivot.
    #[must_use]
    pub fn min_pivot(&self) -> f64 {
        self.pivots.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The largest pivot.
    #[must_use]
    pub fn max_pivot(&self) -> f64 {
        self.pivots.iter().copied().fold(0.0, f64::max)
    }
}

/// Indices by descending value, ties by ascending index.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&i, &j| values[j].total_cmp(&values[i]).then(i.cmp(&j)));
    order
}
