//! GPTQ: rounds column by column and compensates each error in the columns to come.
//!
//! The algorithm is E. Frantar, S. Ashkboos, T. Hoefler and D. Alistarh, *GPTQ* (2022, arXiv:2210.17323). It is
//! published with the inverse of the damped Hessian `S`; the same codes come without an inverse:
//!
//! 1. With `S = A diag(p) A^T`, `A` unit upper, the column that GPTQ rounds is `w_j + sum_{i<j} (w_i - q_i) A_ij`
//!    (J. Chee et al., *QuIP*, 2023, arXiv:2307.13304).
//! 2. As in the published code, updates are lazy: one column at a time inside a block, and one product for all columns
//!    to the right of it. Each entry is one chain of fused multiply-adds with `i` ascending, so block size and threads
//!    change nothing.
//! 3. The damped proxy `tr(D S D^T)` comes for free: `(W - Q) R` has the entries `R_jj (w'_j - q_j)`, `w'` the updated
//!    weights.
//! 4. Rows are independent: every task takes a batch of them through all columns, with no barrier in between.
//! 5. With static scales each row can keep several paths of codes open; they are compared by that proxy (`beam`).

mod batch;
mod beam;
mod column;

use rayon::prelude::*;

use crate::factor::{DampedFactor, Order};
use crate::grid::{Grid, GroupScale, Quantized};
use crate::memory::{gathered, zeros};
use crate::simd::{Isa, Real};
use crate::weight::Weight;
use crate::{Error, Execution, Result};

use batch::{Batch, Problem};
pub use beam::{BLOCK as BEAM_COLUMNS, STRIP as BEAM_STRIP};

/// Default number of columns between two long updates.
pub const BLOCK_SIZE: usize = 128;

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

/// The losses of a solve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// `tr(D H D^T)` with the undamped `H`.
    pub proxy: f64,
    /// `tr(D S D^T)` with the damped one.
    pub proxy_damped: f64,
}

/// Options of GPTQ besides the grid.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// When scales are taken.
    pub scales: Scales,
    /// Columns between two long updates; changes no code.
    pub block_size: usize,
    /// Paths of codes that stay open in a row, see `beam`; 1: GPTQ. More ask for scales that are known beforehand.
    pub beam: usize,
    /// Instruction set; changes no code.
    pub isa: Isa,
}

impl Options {
    fn check(&self, rule: Order) -> Result<()> {
        if self.block_size == 0 {
            return Err(Error::setting("block_size", self.block_size, "1 or more"));
        }
        if self.beam == 0 {
            return Err(Error::setting("beam", self.beam, "1 or more"));
        }
        if self.scales == Scales::Group && self.beam > 1 {
            return Err(Error::setting("scales", "'group'", "'static' with more than one path"));
        }
        if self.scales == Scales::Group && rule != Order::Natural {
            let allowed = "'static' where columns are reordered, as by act_order (groups keep their columns)";
            return Err(Error::setting("scales", "'group'", allowed));
        }
        Ok(())
    }
}

/// Vectors of rows that one task takes through the columns together: reading `A` once for all of them is what keeps
/// the solver out of main memory.
fn vectors_per_task<T: Real>(rows: usize, threads: usize) -> usize {
    let wanted = 192 / T::NR;
    let vectors = rows.div_ceil(T::NR);
    // At least two tasks per thread, so that none waits long for the last.
    (vectors / (2 * threads.max(1))).clamp(1, wanted)
}

/// Quantizes `W` against a factored Hessian.
pub fn gptq<T: Real>(
    w: Weight<'_>,
    factor: &DampedFactor<T>,
    grid: &Grid,
    options: &Options,
    execution: &Execution<'_>,
) -> Result<(Quantized, Report)> {
    let dim = factor.dim();
    grid.check_plain()?;
    w.check_width(dim)?;
    options.check(factor.rule())?;
    run(w, factor, grid, options, None, execution)
}

/// Quantizes `W` once more with the scales and zero points that it has.
pub(crate) fn again<T: Real>(
    w: Weight<'_>,
    factor: &DampedFactor<T>,
    grid: &Grid,
    options: &Options,
    scales: &[GroupScale],
    execution: &Execution<'_>,
) -> Result<Quantized> {
    Ok(run(w, factor, grid, options, Some(scales), execution)?.0)
}

fn run<T: Real>(
    w: Weight<'_>,
    factor: &DampedFactor<T>,
    grid: &Grid,
    options: &Options,
    scales: Option<&[GroupScale]>,
    execution: &Execution<'_>,
) -> Result<(Quantized, Report)> {
    let (rows, dim) = (w.rows(), w.dim());
    let n_groups = grid.n_groups(dim);
    let mut out = Quantized::zeroed(rows, dim, grid)?;
    let pool = execution.pool()?;
    let batch_rows = vectors_per_task::<T>(rows, pool.current_num_threads()) * T::NR;
    // Cost of a unit error in a column after the later columns have compensated it.
    let mut weights = zeros("weights of the scale search", dim)?;
    for (&column, &pivot) in factor.order().iter().zip(factor.pivots()) {
        weights[column] = pivot;
    }
    let rounding = grid.rounding();
    let problem = Problem { factor, grid, rounding: &rounding, options, weights: &weights };
    let results = pool.install(|| {
        let batches = out
            .codes
            .par_chunks_mut(batch_rows * dim)
            .zip(out.scales.par_chunks_mut(batch_rows * n_groups))
            .with_max_len(1)
            .enumerate()
            .map(|(b, (codes, found))| {
                // Before the search for scales too: batches that have not begun are many.
                execution.check()?;
                let first = b * batch_rows;
                let n = codes.len() / dim;
                let own = first * n_groups..(first + n) * n_groups;
                let scales = scales.map(|scales| &scales[own]);
                let batch = Batch::new(&problem, w.slice(first, n), first, scales)?;
                let solved = batch.solve(codes, execution)?;
                solved.store(found);
                Ok(solved.costs())
            });
        gathered("batches of rows", batches)
    })?;
    let (mut damped, mut added) = (0.0, 0.0);
    for result in results {
        for (row_damped, row_added) in result? {
            damped += row_damped;
            added += row_added;
        }
    }
    Ok((out, Report { proxy: (damped - added).max(0.0), proxy_damped: damped }))
}
