//! `tr(D H D^T)`: the square error of a layer's outputs over the calibration rows, the loss that GPTQ minimises.
//!
//! `W^ - W` is laid out with vectors over rows, in double precision, some hundred rows at a time. Strips of `H` are
//! packed once each, with the entries off the diagonal doubled, and multiplied in the register tile.

use rayon::prelude::*;

use crate::factor::Symmetric;
use crate::memory::zeros;
use crate::simd::{Isa, Real, MR};
use crate::weight::Weight;
use crate::{dims, Error, Execution, Result};

/// Columns of `H` that one task multiplies with.
const WIDTH: usize = 96;

/// Rows of `D` that are held transposed in double precision at a time.
const ROWS: usize = 768;

/// Rows of `H` per stride of a product.
const STRIDE: usize = 256;

/// `tr((W^ - W) H (W^ - W)^T)` in double precision; `w_hat = None` stands for zero and gives `tr(W H W^T)`.
///
/// Reads the upper triangle: the sum over `i <= j` of `D_i H_ij D_j`, entries off the diagonal twice. Sums run in an
/// order that depends on the shapes only.
pub fn proxy(
    w: Weight<'_>,
    w_hat: Option<Weight<'_>>,
    h: Symmetric<'_>,
    execution: &Execution<'_>,
) -> Result<f64> {
    let (rows, dim) = (w.rows(), w.dim());
    w.check_width(h.dim())?;
    if let Some(other) = w_hat.filter(|other| (other.rows(), other.dim()) != (rows, dim)) {
        let got = format!("{} x {}", other.rows(), other.dim());
        return Err(Error::shape("W^", format!("{rows} x {dim}, as W"), got));
    }
    h.check_finite()?;
    let pool = execution.pool()?;
    let mut total = 0.0;
    for first in (0..rows).step_by(ROWS) {
        let n = ROWS.min(rows - first);
        let part = w_hat.map(|v| v.slice(first, n));
        let gaps = pool.install(|| gaps(w.slice(first, n), part))?;
        let parts: Vec<Result<f64>> = pool.install(|| {
            (0..dim.div_ceil(WIDTH))
                .into_par_iter()
                .with_max_len(1)
                .map(|p| {
                    let (from, to) = (p * WIDTH, dim.min((p + 1) * WIDTH));
                    execution.check()?;
                    columns(&gaps, h, from, to)
                })
                .collect()
        });
        for part in parts {
            total += part?;
        }
    }
    Ok(total)
}

/// `W^ - W` with vectors over rows: one matrix of lines per `f64::NR` rows. `dim` is padded to whole strips.
fn gaps(w: Weight<'_>, w_hat: Option<Weight<'_>>) -> Result<Vec<Vec<f64>>> {
    let dim = w.dim();
    let size = dims::product("W^ - W", dim.next_multiple_of(MR), f64::NR)?;
    let vectors = w.values().par_chunks(f64::NR * dim).enumerate().map(|(v, rows)| {
        let mut lines = zeros("W^ - W", size)?;
        for (lane, row) in rows.chunks_exact(dim).enumerate() {
            let at = (v * f64::NR + lane) * dim;
            for (j, &value) in row.iter().enumerate() {
                let hat = w_hat.map_or(0.0, |all| f64::from(all.values()[at + j]));
                lines[j * f64::NR + lane] = hat - f64::from(value);
            }
        }
        Ok(lines)
    });
    vectors.collect()
}

/// The share of columns `from..to`.
fn columns(gaps: &[Vec<f64>], h: Symmetric<'_>, from: usize, to: usize) -> Result<f64> {
    let (nr, isa) = (f64::NR, Isa::best());
    // Twice the entries above the diagonal, once those on it.
    let mut packed: Vec<f64> = zeros("columns of H", to * WIDTH)?;
    for (i, line) in packed.chunks_exact_mut(WIDTH).enumerate() {
        for j in from.max(i)..to {
            line[j - from] = if i == j { h.at(i, j) } else { 2.0 * h.at(i, j) };
        }
    }
    let mut sum = 0.0;
    let mut products: Vec<f64> = zeros("columns of H", WIDTH * nr)?;
    for lines in gaps {
        products.fill(0.0);
        for start in (0..to).step_by(STRIDE) {
            let k = STRIDE.min(to - start);
            for c in (0..(to - from).next_multiple_of(MR)).step_by(MR) {
                let a = &packed[start * WIDTH + c..];
                f64::tile(isa, k, a, WIDTH, &lines[start * nr..], nr, &mut products[c * nr..], nr);
            }
        }
        for (product, gap) in products.iter().zip(&lines[from * nr..to * nr]) {
            sum += product * gap;
        }
    }
    Ok(sum)
}
