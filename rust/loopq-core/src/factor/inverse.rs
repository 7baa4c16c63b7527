//! `S^-1 = B^T diag(1 / p) B`, `B = A^-1`, from `S = A diag(p) A^T`.

use rayon::prelude::*;

use crate::factor::ldl::Ldl;
use crate::factor::panels::PANEL_WIDTH as W;
use crate::memory::{zeros, Buffer};
use crate::simd::{axpy, Isa, Real, MR};
use crate::{dims, Execution, Result};

/// Rows of `A` that are packed at a time.
const ROWS: usize = 64;

/// Lines of one stride of a product: two operands of this many lines fit the second-level cache.
const STRIDE: usize = 256;

const NR: usize = <f64 as Real>::NR;

impl Ldl<f64> {
    /// The lower triangle of `S^-1`, row-major; what stands above it is of no meaning. Indices are places of the order.
    pub(super) fn inverse(&self, execution: &Execution<'_>) -> Result<Buffer<f64>> {
        let dim = self.a.dim;
        let mut out = Buffer::zeroed("the inverse of a Hessian", dims::product("S^-1", dim, dim)?)?;
        execution.pool()?.install(|| {
            let columns: Vec<Vec<f64>> = (0..dim.div_ceil(W))
                .into_par_iter()
                .with_max_len(1)
                .map(|p| self.columns_of_inverse(p, execution))
                .collect::<Result<_>>()?;
            out.par_chunks_mut(W * dim).with_max_len(1).enumerate().try_for_each(|(p, rows)| {
                for q in 0..=p {
                    execution.check()?;
                    self.weighted(&columns[p], &columns[q], dim.min((q + 1) * W), rows, q * W)?;
                }
                Ok(())
            })
        })?;
        Ok(out)
    }

    /// Columns `p W..` of `B`, by lines: from `A B = I`, the last rows first.
    fn columns_of_inverse(&self, p: usize, execution: &Execution<'_>) -> Result<Vec<f64>> {
        let isa = Isa::best();
        let end = self.a.dim.min((p + 1) * W);
        let mut b = zeros("the inverse of a factor", end.next_multiple_of(ROWS) * W)?;
        for j in p * W..end {
            b[j * W + j % W] = 1.0;
        }
        let mut packed: Vec<f64> = zeros("rows of a factor", end * ROWS)?;
        for first in (0..end).step_by(ROWS).rev() {
            execution.check()?;
            let next = end.min(first + ROWS);
            for (k, line) in (next..end).zip(packed.chunks_exact_mut(ROWS)) {
                for (i, entry) in line.iter_mut().enumerate() {
                    *entry = -self.a.at(first + i, k);
                }
            }
            let (above, below) = b.split_at_mut(next * W);
            for start in (0..end - next).step_by(STRIDE) {
                let k = STRIDE.min(end - next - start);
                for (i, c) in (0..ROWS).step_by(MR).flat_map(|i| (0..W).step_by(NR).map(move |c| (i, c))) {
                    let to = &mut above[(first + i) * W + c..];
                    f64::tile(isa, k, &packed[start * ROWS + i..], ROWS, &below[start * W + c..], W, to, W);
                }
            }
            for i in (first..next).rev() {
                let (row, later) = b[i * W..].split_at_mut(W);
                for k in i + 1..next {
                    axpy(isa, -self.a.at(i, k), &later[(k - i - 1) * W..(k - i) * W], row);
                }
            }
        }
        Ok(b)
    }

    /// Writes `sum_k left[k] right[k]^T / p_k` over the first `n` lines to columns `from..` of `rows`.
    fn weighted(&self, left: &[f64], right: &[f64], n: usize, rows: &mut [f64], from: usize) -> Result<()> {
        let (isa, what) = (Isa::best(), "a square of the inverse of a Hessian");
        let (mut sums, mut scaled): (Vec<f64>, Vec<f64>) = (zeros(what, W * W)?, zeros(what, STRIDE * W)?);
        for start in (0..n).step_by(STRIDE) {
            let k = STRIDE.min(n - start);
            for ((to, line), pivot) in scaled
                .chunks_exact_mut(W)
                .zip(right[start * W..].chunks_exact(W))
                .zip(&self.pivots[start..start + k])
            {
                for (to, &value) in to.iter_mut().zip(line) {
                    *to = value / pivot;
                }
            }
            for (i, c) in (0..W).step_by(MR).flat_map(|i| (0..W).step_by(NR).map(move |c| (i, c))) {
                f64::tile(isa, k, &left[start * W + i..], W, &scaled[c..], W, &mut sums[i * W + c..], W);
            }
        }
        let width = W.min(self.a.dim - from);
        for (row, sums) in rows.chunks_exact_mut(self.a.dim).zip(sums.chunks_exact(W)) {
            row[from..from + width].copy_from_slice(&sums[..width]);
        }
        Ok(())
    }
}
