//! `tr(D H D^T)`: the square error of a layer's outputs over the calibration rows.

use rayon::prelude::*;

use crate::factor::Symmetric;
use crate::pool::pool;
use crate::solve::check_weight;
use crate::{Result, Watch};

/// `tr((W^ - W) H (W^ - W)^T)` in double precision; `w_hat = None` stands for zero and gives `tr(W H W^T)`.
pub fn proxy(
    w: &[f32],
    w_hat: Option<&[f32]>,
    rows: usize,
    dim: usize,
    h: Symmetric<'_>,
    threads: usize,
    watch: &Watch,
) -> Result<f64> {
    check_weight("W", w, rows, dim)?;
    if let Some(w_hat) = w_hat {
        check_weight("W^", w_hat, rows, dim)?;
    }
    h.check(dim)?;
    let per_row: Vec<Result<f64>> = pool(threads)?.install(|| {
        (0..rows)
            .into_par_iter()
            .map(|r| {
                watch.check()?;
                let d: Vec<f64> = (r * dim..(r + 1) * dim)
                    .map(|i| f64::from(w_hat.map_or(0.0, |v| v[i])) - f64::from(w[i]))
                    .collect();
                let mut sum = 0.0;
                for i in 0..dim {
                    let mut line = 0.5 * h.at(i * dim + i) * d[i];
                    for j in i + 1..dim {
                        line += h.at(i * dim + j) * d[j];
                    }
                    sum += 2.0 * d[i] * line;
                }
                Ok(sum)
            })
            .collect()
    });
    per_row.into_iter().try_fold(0.0, |sum, row| Ok(sum + row?))
}
