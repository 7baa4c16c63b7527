//! GPTQ by the reversed Cholesky factor.
//!
//! With `H' = R R^T` (`R` upper) and `A = R diag(R)^-1`, the column `j` that GPTQ rounds is
//! `w_j + sum_{i<j} (w_i - q_i) A_ij`: the very codes of the inverse form, without an inverse. One fused multiply-add
//! chain per entry, `i` ascending, so that block size and threads change nothing.
//!
//! The damped proxy comes for free: `(W - Q) R` has the entries `R_jj (w'_j - q_j)`.

use rayon::prelude::*;

use crate::factor::Factor;
use crate::grid::{Grid, Level, Quantized};
use crate::pool::pool;
use crate::simd::Real;
use crate::solve::{check_weight, located};
use crate::{Error, Result, Watch};

/// When a group's scale is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// When the solver reaches the group, from the weights as earlier columns have changed them.
    Group,
    /// Before the sweep, from the original weights.
    Static,
}

impl Scales {
    /// The mode with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "group" => Ok(Self::Group),
            "static" => Ok(Self::Static),
            _ => Err(Error::setting(
                "scales",
                format!("{name:?}"),
                "'group', 'static'",
            )),
        }
    }
}

/// What a solve says about itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqReport {
    /// `tr(D H D^T)` with the undamped `H`.
    pub proxy: f64,
    /// `tr(D H' D^T)` with the damped one.
    pub proxy_damped: f64,
}

struct RowResult {
    damped: f64,
    error: f64,
}

/// Quantizes `W` (rows, dim) against a factored Hessian.
pub fn gptq<T: Real>(
    w: &[f32],
    rows: usize,
    factor: &Factor<T>,
    grid: &Grid,
    scales: Scales,
    block_size: usize,
    threads: usize,
    watch: &Watch,
) -> Result<(Quantized, GptqReport)> {
    let dim = factor.dim();
    grid.check()?;
    check_weight("W", w, rows, dim)?;
    if block_size == 0 {
        return Err(Error::setting("block_size", block_size, "1 or more"));
    }
    if scales == Scales::Group && !factor.order().is_empty() {
        return Err(Error::setting(
            "scales",
            "'group'",
            "'static' with act_order (groups keep their columns)",
        ));
    }
    let n_groups = grid.n_groups(dim);
    let mut out = Quantized {
        codes: vec![0; rows * dim],
        scales: vec![0.0; rows * n_groups],
        zeros: vec![0; rows * n_groups],
    };
    let results: Vec<Result<RowResult>> = pool(threads)?.install(|| {
        out.codes
            .par_chunks_mut(dim)
            .zip(
                out.scales
                    .par_chunks_mut(n_groups)
                    .zip(out.zeros.par_chunks_mut(n_groups)),
            )
            .enumerate()
            .map(|(r, (codes, (scale, zero)))| {
                watch.check()?;
                solve_row(
                    &w[r * dim..(r + 1) * dim],
                    r,
                    factor,
                    grid,
                    scales,
                    codes,
                    scale,
                    zero,
                )
            })
            .collect()
    });
    let (mut damped, mut error) = (0.0, 0.0);
    for result in results {
        let row = result?;
        damped += row.damped;
        error += row.error;
    }
    let proxy = (damped - factor.damping_abs * error).max(0.0);
    Ok((
        out,
        GptqReport {
            proxy,
            proxy_damped: damped,
        },
    ))
}

fn solve_row<T: Real>(
    w: &[f32],
    r: usize,
    factor: &Factor<T>,
    grid: &Grid,
    mode: Scales,
    codes: &mut [u8],
    scales: &mut [f32],
    zeros: &mut [u8],
) -> Result<RowResult> {
    let (dim, group) = (w.len(), grid.group(w.len()));
    let column = |j: usize| factor.order().get(j).copied().unwrap_or(j);
    // `R_jj^2` is what an error in column j costs once the later columns have made up for it.
    let mut weights = vec![0.0; dim];
    for j in 0..dim {
        weights[column(j)] = factor.pivots()[j];
    }
    let fit = |g: usize, values: &[f64]| {
        let range = g * group..dim.min((g + 1) * group);
        grid.fit(values, Some(&weights[range]))
            .map_err(|e| located(e, r, g))
    };
    let mut levels = vec![
        Level {
            scale: 1.0,
            zero: 0
        };
        grid.n_groups(dim)
    ];
    if mode == Scales::Static {
        for (g, chunk) in w.chunks(group).enumerate() {
            let values: Vec<f64> = chunk.iter().map(|&v| f64::from(v)).collect();
            levels[g] = fit(g, &values)?;
        }
    }
    let original: Vec<T> = (0..dim).map(|j| T::of(f64::from(w[column(j)]))).collect();
    let mut updated = original.clone();
    let (mut damped, mut error) = (0.0, 0.0);
    for j in 0..dim {
        let c = column(j);
        if mode == Scales::Group && j % group == 0 {
            levels[j / group] = fit(
                j / group,
                &group_start(factor, &original, &updated, j, dim.min(j + group)),
            )?;
        }
        let level = levels[c / group];
        let code = level.code(updated[j].wide(), grid.top());
        let value = T::of(f64::from(level.value(code)));
        codes[c] = code;
        let (gap, e) = (updated[j].wide() - value.wide(), original[j] - value);
        damped += factor.pivots()[j] * gap * gap;
        error += e.wide() * e.wide();
        let row = &factor.a[j * dim..(j + 1) * dim];
        for k in j + 1..dim {
            updated[k] = e.fma(row[k], updated[k]);
        }
    }
    for (g, level) in levels.iter().enumerate() {
        scales[g] = level.scale;
        zeros[g] = level.zero;
    }
    Ok(RowResult { damped, error })
}

/// The weights of columns `from..to` as GPTQ sees them when it reaches `from`: the best real-valued continuation,
/// `w + (E A) A_gg^-1` with `A_gg` the unit upper triangle inside the group.
fn group_start<T: Real>(
    factor: &Factor<T>,
    original: &[T],
    updated: &[T],
    from: usize,
    to: usize,
) -> Vec<f64> {
    let dim = factor.dim();
    let mut shift: Vec<T> = (from..to).map(|j| updated[j] - original[j]).collect();
    for i in 0..to - from {
        let s = -shift[i];
        for k in i + 1..to - from {
            shift[k] = s.fma(factor.a[(from + i) * dim + from + k], shift[k]);
        }
    }
    shift
        .iter()
        .zip(from..to)
        .map(|(&s, j)| (original[j] + s).wide())
        .collect()
}
