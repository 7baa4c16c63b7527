//! The full solver under a metric on both sides: `tr(A D S D^T)`, `A` between outputs, `S` between inputs.
//!
//! With `A = U diag(p) U^T`, `U` unit upper triangular, the loss is `sum_i p_i || D_i + sum_{k<i} U_ki D_k ||_S^2`: rows are
//! solved one tile after the other, each towards what makes up for the errors of the rows before it, exactly as a
//! sweep treats columns. Then every row is solved again with all others fixed and taken where the whole loss falls.

use rayon::prelude::*;

use crate::grid::Quantized;
use crate::pool::pool;
use crate::solve::descent::{add_product, Field, Lane, LANES};
use crate::solve::full::{collect, solve_tile, FullSettings, Prepared, Solved};
use crate::solve::{check_weight, located};
use crate::{Error, Result, Watch};

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
    field: &'a Field<'a>,
    settings: &'a FullSettings,
    cost: &'a [f64],
    left: &'a Prepared,
    /// Targets in the order of the left side.
    goal: Vec<f64>,
    error: Vec<f64>,
    out: Quantized,
}

/// Quantizes `W` (rows, dim); `left` are the metrics of consecutive blocks of rows, which are coupled within only.
pub fn coupled(
    w: &[f32],
    rows: usize,
    prepared: &Prepared,
    left: &[&Prepared],
    settings: &FullSettings,
    passes: usize,
    threads: usize,
    watch: &Watch,
) -> Result<(Quantized, CoupledReport)> {
    let dim = prepared.dim();
    settings.grid.check()?;
    check_weight("W", w, rows, dim)?;
    let covered: usize = left.iter().map(|l| l.dim()).sum();
    if covered != rows {
        return Err(Error::shape("A", rows, covered));
    }
    let cost = prepared.cost(settings.cost);
    let field = prepared.field(settings);
    let mut start = 0;
    let parts: Vec<(usize, &Prepared)> = left
        .iter()
        .map(|l| {
            start += l.dim();
            (start - l.dim(), *l)
        })
        .collect();
    let solved: Vec<Result<(Quantized, CoupledReport)>> = pool(threads)?.install(|| {
        parts
            .par_iter()
            .map(|&(from, l)| {
                let w = &w[from * dim..(from + l.dim()) * dim];
                let block = Block::new(w, &field, settings, &cost, l);
                block.run(passes, watch).map_err(|e| moved(e, |row| from + row))
            })
            .collect()
    });
    let mut out = Quantized { codes: Vec::new(), scales: Vec::new(), zeros: Vec::new() };
    let mut report = CoupledReport { swept: 0.0, settled: 0.0, replaced: 0 };
    for part in solved {
        let (part, facts) = part?;
        out.codes.extend(part.codes);
        out.scales.extend(part.scales);
        out.zeros.extend(part.zeros);
        report.swept += facts.swept;
        report.settled += facts.settled;
        report.replaced += facts.replaced;
    }
    Ok((out, report))
}

impl<'a> Block<'a> {
    fn new(
        w: &[f32],
        field: &'a Field<'a>,
        settings: &'a FullSettings,
        cost: &'a [f64],
        left: &'a Prepared,
    ) -> Self {
        let (rows, dim) = (left.dim(), field.dim);
        let groups = field.grid.n_groups(dim);
        let goal = left
            .order()
            .iter()
            .flat_map(|&r| w[r * dim..(r + 1) * dim].iter().map(|&v| f64::from(v)))
            .collect();
        let out = Quantized {
            codes: vec![0; rows * dim],
            scales: vec![0.0; rows * groups],
            zeros: vec![0; rows * groups],
        };
        Self { field, settings, cost, left, goal, error: vec![0.0; rows * dim], out }
    }

    fn run(mut self, passes: usize, watch: &Watch) -> Result<(Quantized, CoupledReport)> {
        let rows = self.left.dim();
        watch.plan((rows.div_ceil(LANES) as u64).saturating_mul(1 + passes as u64));
        for first in (0..rows).step_by(LANES) {
            self.sweep(first, LANES.min(rows - first), watch)?;
            watch.advance(1)?;
        }
        let swept = self.loss();
        let mut replaced = 0;
        for _ in 0..passes {
            let before = replaced;
            for first in (0..rows).step_by(LANES) {
                replaced += self.again(first, LANES.min(rows - first), watch)?;
                watch.advance(1)?;
            }
            if replaced == before {
                break;
            }
        }
        let report = CoupledReport { swept, settled: self.loss(), replaced };
        Ok((self.out, report))
    }

    /// Solves the rows of a tile for the first time.
    fn sweep(&mut self, first: usize, n: usize, watch: &Watch) -> Result<()> {
        let (dim, rows) = (self.field.dim, self.left.dim());
        let mut shift = vec![0.0; n * dim];
        for i in 0..n {
            let (done, shift) = shift.split_at_mut(i * dim);
            let shift = &mut shift[..dim];
            for k in 0..first {
                axpy(shift, self.left.a()[k * rows + first + i], &self.error[k * dim..(k + 1) * dim]);
            }
            // Rows of the same tile have no codes yet: they stand at their own best real values.
            for k in 0..i {
                axpy(shift, -self.left.a()[(first + k) * rows + first + i], &done[k * dim..(k + 1) * dim]);
            }
        }
        let (part, values) = self.solve(first, n, &shift, watch)?;
        for i in 0..n {
            let row = first + i;
            for (j, (to, value)) in self.error[row * dim..(row + 1) * dim].iter_mut().zip(&values).enumerate()
            {
                *to = value[i] - self.goal[row * dim + j];
            }
            self.keep(row, i, &part);
        }
        Ok(())
    }

    /// Solves the rows of a tile with all others fixed, and takes each over where the loss falls; returns how many.
    fn again(&mut self, first: usize, n: usize, watch: &Watch) -> Result<u64> {
        let dim = self.field.dim;
        let mut pull: Vec<f64> = (0..n).flat_map(|i| self.pull(first + i)).collect();
        let mut shift = vec![0.0; n * dim];
        for i in 0..n {
            let own = self.entry(first + i, first + i);
            for j in 0..dim {
                shift[i * dim + j] = pull[i * dim + j] / own - self.error[(first + i) * dim + j];
            }
        }
        let (part, values) = self.solve(first, n, &shift, watch)?;
        let change: Vec<Lane> = (0..dim)
            .map(|j| {
                std::array::from_fn(|i| {
                    if i >= n {
                        return 0.0;
                    }
                    let at = (first + i) * dim + j;
                    values[j][i] - self.goal[at] - self.error[at]
                })
            })
            .collect();
        let mut image = vec![[0.0; LANES]; dim];
        for (j, lane) in change.iter().enumerate() {
            add_product(&mut image, self.field.s_row(j), lane);
        }
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
    fn solve(&self, first: usize, n: usize, shift: &[f64], watch: &Watch) -> Result<(Quantized, Vec<Lane>)> {
        let dim = self.field.dim;
        let from = &self.goal[first * dim..(first + n) * dim];
        let w: Vec<f32> = from.iter().zip(shift).map(|(g, s)| (g - s) as f32).collect();
        // A tile counts its rows from 0 and in the order of their solution.
        let solved: Solved = solve_tile(self.field, self.settings, &w, n, 0, self.cost, watch)
            .map_err(|e| moved(e, |row| self.left.order()[first + row]))?;
        let values = solved.choice.values.clone();
        let (part, _) = collect(vec![Ok(solved)], self.field, n)?;
        Ok((part, values))
    }

    /// Puts row `i` of a tile where it belongs.
    fn keep(&mut self, row: usize, i: usize, part: &Quantized) {
        let (dim, groups) = (self.field.dim, self.field.grid.n_groups(self.field.dim));
        let to = self.left.order()[row];
        self.out.codes[to * dim..(to + 1) * dim].copy_from_slice(&part.codes[i * dim..(i + 1) * dim]);
        let (own, at) = (to * groups..(to + 1) * groups, i * groups..(i + 1) * groups);
        self.out.scales[own.clone()].copy_from_slice(&part.scales[at.clone()]);
        self.out.zeros[own].copy_from_slice(&part.zeros[at]);
    }

    /// Entry of `A` for two places of the order.
    fn entry(&self, i: usize, k: usize) -> f64 {
        let order = self.left.order();
        self.left.s()[order[i] * self.left.dim() + order[k]]
    }

    /// `(A D)` at one place.
    fn pull(&self, row: usize) -> Vec<f64> {
        let dim = self.field.dim;
        let mut out = vec![0.0; dim];
        for k in 0..self.left.dim() {
            axpy(&mut out, self.entry(row, k), &self.error[k * dim..(k + 1) * dim]);
        }
        out
    }

    /// `tr(A D S D^T)`.
    fn loss(&self) -> f64 {
        let dim = self.field.dim;
        let mut total = 0.0;
        for first in (0..self.left.dim()).step_by(LANES) {
            let n = LANES.min(self.left.dim() - first);
            let mut image = vec![[0.0; LANES]; dim];
            for j in 0..dim {
                let lane =
                    std::array::from_fn(|i| if i < n { self.error[(first + i) * dim + j] } else { 0.0 });
                add_product(&mut image, self.field.s_row(j), &lane);
            }
            for i in 0..n {
                total += self.pull(first + i).iter().zip(&image).map(|(p, lane)| p * lane[i]).sum::<f64>();
            }
        }
        total
    }
}

/// A scale's error with its row where the weight has it.
fn moved(error: Error, place: impl Fn(usize) -> usize) -> Error {
    match error {
        Error::ScaleRange { row, group, .. } => located(error, place(row), group),
        other => other,
    }
}

fn axpy(to: &mut [f64], by: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += by * from;
    }
}
