//! The solver under a metric on both sides: `tr(A D S D^T)`, `A` between outputs, `S` between inputs.
//!
//! With `A = U diag(p) U^T`, `U` unit upper triangular, the loss is `sum_i p_i || D_i + sum_{k<i} U_ki D_k ||_S^2`: rows are
//! solved one tile after the other, each towards what makes up for the errors of the rows before it, exactly as a
//! sweep treats columns. Then every row is solved again with all others fixed and taken where the whole loss falls.

use crate::blocks::in_blocks;
use crate::coordinate::{Problem, Settings, SCRATCH};
use crate::factor::DampedHessian;
use crate::grid::Quantized;
use crate::lanes::{Lane, LANES};
use crate::memory::{collected, zeros};
use crate::simd::add_times;
use crate::weight::Weight;
use crate::{dims, Execution, Result};

/// How the loss fell.
#[derive(Clone, Debug, PartialEq)]
pub struct CoupledReport {
    /// `tr(A D S D^T)` after the sweep over rows.
    pub swept: f64,
    /// At the end.
    pub settled: f64,
    /// Rows replaced after the sweep.
    pub replaced: u64,
}

/// Rows of one block in the order of their solution, with errors and codes.
struct Block<'a> {
    problem: &'a Problem<'a>,
    execution: &'a Execution<'a>,
    /// `A`, row-major, full, and its factor.
    metric: &'a [f64],
    left: DampedHessian<'a>,
    /// The block's weight in the order of the left side.
    target: Vec<f64>,
    error: Vec<f64>,
    out: Quantized,
}

/// Quantizes `W`; `left` are the metrics of consecutive blocks of rows, which are coupled within only. Up to `passes`
/// times every row is solved again.
pub fn coupled(
    w: Weight<'_>,
    input: &DampedHessian<'_>,
    left: &[DampedHessian<'_>],
    settings: &Settings,
    passes: usize,
    execution: &Execution<'_>,
) -> Result<(Quantized, CoupledReport)> {
    let problem = Problem::new(w, input, settings)?;
    let (out, reports) = in_blocks(w, left, execution, |rows, &metric| {
        Block::new(rows, &problem, metric, execution)?.run(passes)
    })?;
    let mut report = CoupledReport { swept: 0.0, settled: 0.0, replaced: 0 };
    for facts in reports {
        report.swept += facts.swept;
        report.settled += facts.settled;
        report.replaced += facts.replaced;
    }
    Ok((out, report))
}

impl<'a> Block<'a> {
    fn new(
        w: Weight<'_>,
        problem: &'a Problem<'a>,
        left: DampedHessian<'a>,
        execution: &'a Execution<'a>,
    ) -> Result<Self> {
        let (rows, dim) = (w.rows(), w.dim());
        let size = dims::product("errors of the rows", rows, dim)?;
        let mut target = zeros("the target of the rows", size)?;
        for (to, &r) in target.chunks_exact_mut(dim).zip(left.factor().order()) {
            for (to, &v) in to.iter_mut().zip(&w.values()[r * dim..(r + 1) * dim]) {
                *to = f64::from(v);
            }
        }
        let error = zeros("errors of the rows", size)?;
        let out = Quantized::zeroed(rows, dim, &problem.grid)?;
        Ok(Self { problem, execution, metric: left.matrix()?, left, target, error, out })
    }

    fn rows(&self) -> usize {
        self.left.factor().dim()
    }

    fn run(mut self, passes: usize) -> Result<(Quantized, CoupledReport)> {
        let rows = self.rows();
        for first in (0..rows).step_by(LANES) {
            self.sweep(first, LANES.min(rows - first))?;
        }
        let swept = self.loss()?;
        let mut replaced = 0;
        for _ in 0..passes {
            let before = replaced;
            for first in (0..rows).step_by(LANES) {
                replaced += self.again(first, LANES.min(rows - first))?;
            }
            if replaced == before {
                break;
            }
        }
        let report = CoupledReport { swept, settled: self.loss()?, replaced };
        Ok((self.out, report))
    }

    /// Solves the rows of a tile for the first time.
    fn sweep(&mut self, first: usize, n: usize) -> Result<()> {
        let (dim, factor, isa) = (self.problem.dim, self.left.factor(), self.problem.isa);
        let mut shift: Vec<f64> = zeros(SCRATCH, n * dim)?;
        for i in 0..n {
            self.execution.check()?;
            let (done, shift) = shift.split_at_mut(i * dim);
            let shift = &mut shift[..dim];
            for k in 0..first {
                add_times(isa, factor.entry(k, first + i), &self.error[k * dim..(k + 1) * dim], shift);
            }
            // Rows of the same tile have no codes yet: they stand at their own best real values.
            for k in 0..i {
                add_times(isa, -factor.entry(first + k, first + i), &done[k * dim..(k + 1) * dim], shift);
            }
        }
        let (part, values) = self.solve(first, n, &shift)?;
        for i in 0..n {
            let row = first + i;
            for (j, (to, value)) in self.error[row * dim..(row + 1) * dim].iter_mut().zip(&values).enumerate()
            {
                *to = value[i] - self.target[row * dim + j];
            }
            self.keep(row, i, &part);
        }
        Ok(())
    }

    /// Solves the rows of a tile with all others fixed, and takes each over where the loss falls; returns how many.
    fn again(&mut self, first: usize, n: usize) -> Result<u64> {
        let dim = self.problem.dim;
        let mut pull: Vec<f64> = zeros(SCRATCH, n * dim)?;
        for (i, pull) in pull.chunks_exact_mut(dim).enumerate() {
            self.pull(first + i, pull)?;
        }
        let mut shift = zeros(SCRATCH, n * dim)?;
        for i in 0..n {
            let own = self.entry(first + i, first + i);
            for j in 0..dim {
                shift[i * dim + j] = pull[i * dim + j] / own - self.error[(first + i) * dim + j];
            }
        }
        let (part, values) = self.solve(first, n, &shift)?;
        let lane = |j: usize| {
            std::array::from_fn(|i| {
                if i >= n {
                    return 0.0;
                }
                let at = (first + i) * dim + j;
                values[j][i] - self.target[at] - self.error[at]
            })
        };
        let change: Vec<Lane> = collected(SCRATCH, (0..dim).map(lane))?;
        let image = self.problem.image(&change)?;
        let mut taken = 0;
        for i in 0..n {
            let own = self.entry(first + i, first + i);
            let gain: f64 =
                (0..dim).map(|j| image[j][i] * (2.0 * pull[i * dim + j] + own * change[j][i])).sum();
            if !(gain < 0.0) {
                continue;
            }
            taken += 1;
            for j in 0..dim {
                self.error[(first + i) * dim + j] += change[j][i];
            }
            for k in 0..n {
                let a = self.entry(first + k, first + i);
                for j in 0..dim {
                    pull[k * dim + j] += a * change[j][i];
                }
            }
            self.keep(first + i, i, &part);
        }
        Ok(taken)
    }

    /// Solves a tile towards its targets less `shift`; returns codes and values by column.
    fn solve(&self, first: usize, n: usize, shift: &[f64]) -> Result<(Quantized, Vec<Lane>)> {
        let dim = self.problem.dim;
        let from = &self.target[first * dim..(first + n) * dim];
        let w: Vec<f32> = collected(SCRATCH, from.iter().zip(shift).map(|(g, s)| (g - s) as f32))?;
        // A tile counts its rows from 0 and in the order of their solution.
        let (part, _) = self
            .problem
            .solve(Weight::new("the target of the rows", &w, n, dim)?, self.execution)
            .map_err(|e| e.moved(|row| self.left.factor().order()[first + row]))?;
        let groups = self.problem.grid.n_groups(dim);
        let lane = |j: usize| {
            let g = self.problem.group_of(j);
            std::array::from_fn(|i| {
                if i >= n {
                    return 0.0;
                }
                let zero = f32::from(part.zeros[i * groups + g]);
                let step = self.problem.rounding.step(part.codes[i * dim + j], zero);
                f64::from(step * part.scales[i * groups + g])
            })
        };
        let values = collected(SCRATCH, (0..dim).map(lane))?;
        Ok((part, values))
    }

    /// Puts row `i` of a tile where it belongs.
    fn keep(&mut self, row: usize, i: usize, part: &Quantized) {
        let (dim, groups) = (self.problem.dim, self.problem.grid.n_groups(self.problem.dim));
        let to = self.left.factor().order()[row];
        self.out.codes[to * dim..(to + 1) * dim].copy_from_slice(&part.codes[i * dim..(i + 1) * dim]);
        let (own, at) = (to * groups..(to + 1) * groups, i * groups..(i + 1) * groups);
        self.out.scales[own.clone()].copy_from_slice(&part.scales[at.clone()]);
        self.out.zeros[own].copy_from_slice(&part.zeros[at]);
    }

    /// Entry of `A` for two places of the order.
    fn entry(&self, i: usize, k: usize) -> f64 {
        let order = self.left.factor().order();
        self.metric[order[i] * order.len() + order[k]]
    }

    /// Adds `(A D)` at one place to `out`. A wide block takes long enough to be stopped in between.
    fn pull(&self, row: usize, out: &mut [f64]) -> Result<()> {
        self.execution.check()?;
        for (k, error) in self.error.chunks_exact(self.problem.dim).enumerate() {
            add_times(self.problem.isa, self.entry(row, k), error, out);
        }
        Ok(())
    }

    /// `tr(A D S D^T)`.
    fn loss(&self) -> Result<f64> {
        let dim = self.problem.dim;
        let mut total = 0.0;
        let mut pull: Vec<f64> = zeros(SCRATCH, dim)?;
        for first in (0..self.rows()).step_by(LANES) {
            let n = LANES.min(self.rows() - first);
            let lane = |j: usize| {
                std::array::from_fn(|i| if i < n { self.error[(first + i) * dim + j] } else { 0.0 })
            };
            let errors: Vec<Lane> = collected(SCRATCH, (0..dim).map(lane))?;
            let image = self.problem.image(&errors)?;
            for i in 0..n {
                pull.fill(0.0);
                self.pull(first + i, &mut pull)?;
                total += pull.iter().zip(&image).map(|(p, lane)| p * lane[i]).sum::<f64>();
            }
        }
        Ok(total)
    }
}
