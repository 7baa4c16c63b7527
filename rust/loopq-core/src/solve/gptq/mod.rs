//! GPTQ by the reversed Cholesky factor.
//!
//! With `H' = R R^T` (`R` upper) and `A = R diag(R)^-1`, the column `j` that GPTQ rounds is
//! `w_j + sum_{i<j} (w_i - q_i) A_ij`: the very codes of the inverse form, without an inverse. One fused multiply-add
//! chain per entry, `i` ascending, so that block size and threads change nothing.
//!
//! The damped proxy comes for free: `(W - Q) R` has the entries `R_jj (w'_j - q_j)`.
//!
//! Rows are independent: every task takes a batch of them through all columns, with no barrier in between.

mod batch;

use rayon::prelude::*;

use crate::factor::Factor;
use crate::grid::{Grid, Quantized};
use crate::pool::pool;
use crate::simd::{Isa, Real};
use crate::solve::check_weight;
use crate::solve::levels::{static_levels, Levels};
use crate::{dims, Error, Result, Watch};

use batch::{Batch, Job};

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
            _ => Err(Error::setting("scales", format!("{name:?}"), "'group', 'static'")),
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

/// How a solve runs; nothing here changes a bit of the result.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Columns between two long updates.
    pub block_size: usize,
    /// Threads; 0 for all.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Who looks on.
    pub watch: &'a Watch,
}

/// Vectors of rows that one task takes through the columns together: reading `A` once for all of them is what keeps
/// the solver out of main memory.
fn vectors_per_task<T: Real>(rows: usize, threads: usize) -> usize {
    let wanted = 192 / T::NR;
    let vectors = rows.div_ceil(T::NR);
    // At least two tasks per thread, so that none waits long for the last.
    (vectors / (2 * threads.max(1))).clamp(1, wanted)
}

/// Quantizes `W` (rows, dim) against a factored Hessian.
pub fn gptq<T: Real>(
    w: &[f32],
    rows: usize,
    factor: &Factor<T>,
    grid: &Grid,
    scales: Scales,
    run: &Run<'_>,
) -> Result<(Quantized, GptqReport)> {
    let dim = factor.dim();
    grid.check()?;
    check_weight("W", w, rows, dim)?;
    if run.block_size == 0 {
        return Err(Error::setting("block_size", run.block_size, "1 or more"));
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
        codes: vec![0; dims::product("codes", rows, dim)?],
        scales: vec![0.0; rows * n_groups],
        zeros: vec![0; rows * n_groups],
    };
    let pool = pool(run.threads)?;
    let batch_rows = vectors_per_task::<T>(rows, pool.current_num_threads()) * T::NR;
    run.watch.plan((rows as u64).saturating_mul((dim as u64).pow(2) / 2));
    // What an error in a column costs once the later columns have made up for it.
    let mut weights = vec![0.0; dim];
    for (position, &pivot) in factor.pivots().iter().enumerate() {
        weights[factor.order().get(position).copied().unwrap_or(position)] = pivot;
    }
    let job = Job { factor, grid, scales, weights: &weights, run };
    let results: Vec<Result<Vec<(f64, f64)>>> = pool.install(|| {
        out.codes
            .par_chunks_mut(batch_rows * dim)
            .zip(
                out.scales
                    .par_chunks_mut(batch_rows * n_groups)
                    .zip(out.zeros.par_chunks_mut(batch_rows * n_groups)),
            )
            .with_max_len(1)
            .enumerate()
            .map(|(b, (codes, (scales, zeros)))| {
                let first = b * batch_rows;
                let n = codes.len() / dim;
                let weights = &w[first * dim..(first + n) * dim];
                let levels = match job.scales {
                    Scales::Static => static_levels(weights, dim, first, grid, job.weights, run.isa)?,
                    Scales::Group => Levels::unset(n, n_groups),
                };
                let solved = Batch::new(weights, dim, first, levels).solve(&job, codes)?;
                solved.store(scales, zeros);
                Ok(solved.costs())
            })
            .collect()
    });
    let (mut damped, mut error) = (0.0, 0.0);
    for result in results {
        for (row_damped, row_error) in result? {
            damped += row_damped;
            error += row_error;
        }
    }
    let proxy = (damped - factor.damping_abs * error).max(0.0);
    Ok((out, GptqReport { proxy, proxy_damped: damped }))
}
