//! Column after column under `tr(A D S D^T)`, then the scales.
//!
//! With `S = V diag(q) V^T`, `V` unit upper triangular in the order of solution, the loss is a sum over columns of
//! `q_j (e_j + sum_{h<j} V_hj e_h)^T A (e_j + ...)`. Each column is coded once. Its target is its weights, corrected
//! for the errors of the columns before it. Then the scales are solved for, group of columns by group and all rows at
//! once, and accepted where the loss falls.

use std::ops::Range;

use rayon::prelude::*;

use crate::blocks::in_blocks;
use crate::factor::{DampedFactor, DampedHessian, Order, Square, Symmetric};
use crate::grid::{value, Grid, Quantized, Trellis};
use crate::lanes::{Lane, LANES};
use crate::memory::{collected, zeros};
use crate::simd::{add_rows, dot, Isa};
use crate::trellis::search::Search;
use crate::weight::Weight;
use crate::{dims, Error, Execution, Result};

/// Columns that are brought up to date together; a whole number of them is a panel of the factor.
const COLUMNS: usize = 64;
/// Times round of the scales.
const REFITS: usize = 3;
/// Share of the loss below which going round the scales has ended.
const ENOUGH: f64 = 1e-3;
/// Relative damping of the diagonal of a system for scales.
const RIDGE: f64 = 1e-9;
/// Scale of a group of zeros: the smallest number that half precision has.
const SMALLEST: f64 = 1.0 / 16_777_216.0;
/// First scales over the root mean square of their weights, for 2, 3 and 4 bits. These shares had the least error on
/// normal numbers with 16 state bits; within .04 of them the error was at most 1 % higher.
const FIRST: [f64; 3] = [0.86, 0.92, 0.93];
/// Name of a block's memory in errors.
const SCRATCH: &str = "rows that are coded together";

/// How the loss fell.
#[derive(Clone, Debug, PartialEq)]
pub struct TrellisReport {
    /// `tr(A D S D^T)` after the columns.
    pub swept: f64,
    /// With the scales solved for.
    pub settled: f64,
}

/// Rows of one block: a stream in each column.
struct Block<'a> {
    trellis: Trellis,
    grid: &'a Grid,
    execution: &'a Execution<'a>,
    isa: Isa,
    w: Weight<'a>,
    factor: &'a DampedFactor<f64>,
    s: Square<'a>,
    /// `A`, row-major, full, and its factor.
    metric: Square<'a>,
    left: &'a DampedFactor<f64>,
    /// Errors by tile of rows: at first by place in the order of solution, for the scales by column.
    errors: Vec<Vec<Lane>>,
    /// Unscaled values, row-major, by column.
    values: Vec<f64>,
    out: Quantized,
}

/// Codes `W`; `left` are the metrics of consecutive blocks of rows, in their natural order, which are coupled within only.
/// The codes of a block in a column are one stream.
pub fn solve(
    w: Weight<'_>,
    input: &DampedHessian<'_>,
    left: &[DampedHessian<'_>],
    grid: &Grid,
    execution: &Execution<'_>,
) -> Result<(Quantized, TrellisReport)> {
    let trellis = grid.on_trellis()?;
    w.check_width(input.factor().dim())?;
    if left.iter().any(|l| l.factor().rule() != Order::Natural) {
        return Err(Error::setting("order of A", "another", "natural: streams run down the rows"));
    }
    input.matrix()?;
    let (out, reports) = in_blocks(w, left, execution, |rows, metric| {
        Block::new(rows, input, metric, grid, trellis, execution)?.run()
    })?;
    let mut report = TrellisReport { swept: 0.0, settled: 0.0 };
    for facts in reports {
        report.swept += facts.swept;
        report.settled += facts.settled;
    }
    Ok((out, report))
}

impl<'a> Block<'a> {
    fn new(
        w: Weight<'a>,
        input: &DampedHessian<'a>,
        left: &DampedHessian<'a>,
        grid: &'a Grid,
        trellis: Trellis,
        execution: &'a Execution<'a>,
    ) -> Result<Self> {
        let (rows, dim) = (w.rows(), w.dim());
        let tile = |_| zeros(SCRATCH, dim);
        Ok(Self {
            trellis,
            grid,
            execution,
            isa: Isa::best(),
            w,
            factor: input.factor(),
            s: input.matrix()?,
            metric: left.matrix()?,
            left: left.factor(),
            errors: (0..rows.div_ceil(LANES)).map(tile).collect::<Result<_>>()?,
            values: zeros(SCRATCH, dims::product("values", rows, dim)?)?,
            out: Quantized::zeroed(rows, dim, grid)?,
        })
    }

    fn rows(&self) -> usize {
        self.w.rows()
    }

    fn group(&self) -> usize {
        self.grid.group(self.w.dim())
    }

    fn run(mut self) -> Result<(Quantized, TrellisReport)> {
        self.first_scales()?;
        let mut search = Search::new(self.trellis, self.left)?;
        for from in (0..self.w.dim()).step_by(COLUMNS) {
            self.sweep(from, &mut search)?;
        }
        drop(search);
        self.by_column()?;
        let mut gradient = self.gradient()?;
        let swept = self.loss(&gradient)?;
        let mut settled = swept;
        for _ in 0..REFITS {
            let gain = self.refit(&mut gradient)?;
            settled -= gain;
            // One group has no others to agree with.
            if self.grid.n_groups(self.w.dim()) == 1 || gain < ENOUGH * settled {
                break;
            }
        }
        Ok((self.out, TrellisReport { swept, settled }))
    }

    /// A share of the root mean square of each group of a row, columns weighted by what their errors cost.
    fn first_scales(&mut self) -> Result<()> {
        let (dim, group) = (self.w.dim(), self.group());
        let mut cost: Vec<f64> = zeros(SCRATCH, dim)?;
        for (&j, &pivot) in self.factor.order().iter().zip(self.factor.pivots()) {
            cost[j] = pivot;
        }
        let n_groups = self.grid.n_groups(dim);
        let share = FIRST[self.trellis.bits() as usize - 2];
        for (r, row) in self.w.values().chunks_exact(dim).enumerate() {
            for (g, (row, cost)) in row.chunks(group).zip(cost.chunks(group)).enumerate() {
                let square: f64 = row.iter().zip(cost).map(|(&w, c)| c * f64::from(w).powi(2)).sum();
                let wanted = share * (square / cost.iter().sum::<f64>()).sqrt();
                let round = |scale| self.grid.scale_type.round(scale);
                let scale = if round(wanted) == 0.0 { round(SMALLEST) } else { round(wanted) };
                if !scale.is_finite() {
                    let dtype = self.grid.scale_type.name();
                    return Err(Error::ScaleRange { row: r, group: g, value: wanted, dtype });
                }
                self.out.scales[r * n_groups + g].scale = scale;
            }
        }
        Ok(())
    }

    /// Codes the columns of a block of places, in the order of solution.
    fn sweep(&mut self, from: usize, search: &mut Search) -> Result<()> {
        let (dim, rows, isa, factor) = (self.w.dim(), self.rows(), self.isa, self.factor);
        let n_groups = self.grid.n_groups(dim);
        let places = from..dim.min(from + COLUMNS);
        let lines = collected(SCRATCH, (0..from).map(|i| &factor.lines(i, from)[..places.len()]))?;
        let nothing = (0..self.errors.len()).map(|_| [[0.0; LANES]; COLUMNS]);
        let mut shift: Vec<[Lane; COLUMNS]> = collected(SCRATCH, nothing)?;
        shift.par_iter_mut().zip(&self.errors).for_each(|(shift, errors)| {
            add_rows(isa, &mut shift[..places.len()], &lines, &errors[..from]);
        });
        let mut target = zeros(SCRATCH, rows)?;
        let (mut scale, mut codes) = (zeros(SCRATCH, rows)?, zeros(SCRATCH, rows)?);
        for place in places.clone() {
            self.execution.check()?;
            let j = factor.order()[place];
            for r in 0..rows {
                let weight = f64::from(self.w.values()[r * dim + j]);
                target[r] = weight - shift[r / LANES][place - from][r % LANES];
                scale[r] = self.out.scales[r * n_groups + j / self.group()].scale;
            }
            search.run(&target, &scale, &mut codes)?;
            let states = self.trellis.states_of(codes.iter().copied());
            for (r, state) in states.enumerate() {
                let value = value(state as u32);
                self.out.codes[r * dim + j] = codes[r];
                self.values[r * dim + j] = f64::from(value);
                let error = f64::from(value * scale[r]) - f64::from(self.w.values()[r * dim + j]);
                self.errors[r / LANES][place][r % LANES] = error;
            }
            let later = places.end - place - 1;
            if later > 0 {
                let line = &factor.lines(place, place + 1)[..later];
                for (shift, errors) in shift.iter_mut().zip(&self.errors) {
                    add_rows(isa, &mut shift[place + 1 - from..][..later], &[line], &errors[place..=place]);
                }
            }
        }
        Ok(())
    }

    /// Brings the errors from the order of solution into that of the columns.
    fn by_column(&mut self) -> Result<()> {
        let order = self.factor.order();
        for tile in &mut self.errors {
            let mut sorted: Vec<Lane> = zeros(SCRATCH, order.len())?;
            for (lane, &j) in tile.iter().zip(order) {
                sorted[j] = *lane;
            }
            *tile = sorted;
        }
        Ok(())
    }

    /// `D S`, by tile of rows.
    fn gradient(&self) -> Result<Vec<Vec<Lane>>> {
        let rows: Vec<&[f64]> = collected(SCRATCH, (0..self.w.dim()).map(|j| self.s.row(j)))?;
        let image = |errors: &Vec<Lane>| {
            self.execution.check()?;
            let mut image: Vec<Lane> = zeros(SCRATCH, rows.len())?;
            add_rows(self.isa, &mut image, &rows, errors);
            Ok(image)
        };
        self.errors.par_iter().map(image).collect()
    }

    /// `A D S` in some columns, row-major.
    fn pull(&self, gradient: &[Vec<Lane>], columns: &Range<usize>) -> Result<Vec<f64>> {
        let (n, rows) = (columns.len(), self.rows());
        let mut part: Vec<f64> = zeros(SCRATCH, rows * n)?;
        for (r, row) in part.chunks_exact_mut(n).enumerate() {
            for (to, lane) in row.iter_mut().zip(&gradient[r / LANES][columns.clone()]) {
                *to = lane[r % LANES];
            }
        }
        let lines = collected(SCRATCH, part.chunks_exact(n))?;
        let mut out = zeros(SCRATCH, rows * n)?;
        out.par_chunks_mut(LANES * n).enumerate().try_for_each(|(tile, out)| {
            self.execution.check()?;
            let live = tile * LANES..rows.min((tile + 1) * LANES);
            let by = |k: usize| lane_of(&self.metric.row(k)[live.clone()]);
            let by: Vec<Lane> = collected(SCRATCH, (0..rows).map(by))?;
            let mut image: Vec<Lane> = zeros(SCRATCH, n)?;
            add_rows(self.isa, &mut image, &lines, &by);
            for (lane, out) in out.chunks_exact_mut(n).enumerate() {
                out.iter_mut().zip(&image).for_each(|(to, image)| *to = image[lane]);
            }
            Ok::<(), Error>(())
        })?;
        Ok(out)
    }

    /// `tr(A D S D^T)`.
    fn loss(&self, gradient: &[Vec<Lane>]) -> Result<f64> {
        let dim = self.w.dim();
        let mut total = 0.0;
        for from in (0..dim).step_by(COLUMNS) {
            let columns = from..dim.min(from + COLUMNS);
            let pull = self.pull(gradient, &columns)?;
            for (r, pull) in pull.chunks_exact(columns.len()).enumerate() {
                let errors = &self.errors[r / LANES][columns.clone()];
                total += pull.iter().zip(errors).map(|(p, e)| p * e[r % LANES]).sum::<f64>();
            }
        }
        Ok(total)
    }

    /// Goes once round the scales; returns by how much the loss fell.
    ///
    /// For the changes `d` of a group's scales, `B` its unscaled values, the loss falls by `-2 d b - d^T M d`. Here
    /// `M = A * (B S_gg B^T)` (entry by entry) and `b = rowsum(B * (A D S)_g)`.
    fn refit(&mut self, gradient: &mut [Vec<Lane>]) -> Result<f64> {
        let (dim, rows, group) = (self.w.dim(), self.rows(), self.group());
        let mut total = 0.0;
        for (g, from) in (0..dim).step_by(group).enumerate() {
            self.execution.check()?;
            let columns = from..dim.min(from + group);
            let pull = self.pull(gradient, &columns)?;
            let system = self.system(&columns)?;
            let value = |r: usize| &self.values[r * dim..][columns.clone()];
            let slope = |r: usize| dot(value(r), &pull[r * columns.len()..][..columns.len()]);
            let slope: Vec<f64> = collected(SCRATCH, (0..rows).map(slope))?;
            let wanted = self.changes(&system, &slope)?;
            let n_groups = self.grid.n_groups(dim);
            let (mut change, mut scales) = (zeros(SCRATCH, rows)?, zeros(SCRATCH, rows)?);
            for r in 0..rows {
                let old = self.out.scales[r * n_groups + g].scale;
                let new = self.grid.scale_type.round(f64::from(old) + wanted[r]);
                scales[r] = if new.is_finite() && new != 0.0 { new } else { old };
                change[r] = f64::from(scales[r]) - f64::from(old);
            }
            let curve: f64 = (0..rows).map(|r| change[r] * dot(&system[r * rows..][..rows], &change)).sum();
            let gain = -2.0 * dot(&slope, &change) - curve;
            if !(gain > 0.0) {
                continue;
            }
            total += gain;
            for r in 0..rows {
                self.out.scales[r * n_groups + g].scale = scales[r];
            }
            self.follow(gradient, &columns, &change)?;
        }
        Ok(total)
    }

    /// `A * (B S_gg B^T)`, entry by entry.
    fn system(&self, columns: &Range<usize>) -> Result<Vec<f64>> {
        let (dim, rows) = (self.w.dim(), self.rows());
        let mut turned: Vec<f64> = zeros(SCRATCH, columns.len() * rows)?;
        for (j, turned) in columns.clone().zip(turned.chunks_exact_mut(rows)) {
            turned.iter_mut().enumerate().for_each(|(r, to)| *to = self.values[r * dim + j]);
        }
        let s = collected(SCRATCH, columns.clone().map(|j| &self.s.row(j)[columns.clone()]))?;
        let mut out = zeros(SCRATCH, rows * rows)?;
        out.par_chunks_mut(LANES * rows).enumerate().try_for_each(|(tile, out)| {
            self.execution.check()?;
            let (first, live) = (tile * LANES, out.len() / rows);
            let values = turned.chunks_exact(rows);
            let by = collected(SCRATCH, values.clone().map(|line| lane_of(&line[first..first + live])))?;
            let mut image: Vec<Lane> = zeros(SCRATCH, columns.len())?;
            add_rows(self.isa, &mut image, &s, &by);
            // The rows before are known from those.
            let lines = collected(SCRATCH, values.map(|line| &line[first..]))?;
            let mut sums: Vec<Lane> = zeros(SCRATCH, rows - first)?;
            add_rows(self.isa, &mut sums, &lines, &image);
            for (lane, out) in out.chunks_exact_mut(rows).enumerate() {
                for (k, sums) in (first..rows).zip(&sums) {
                    out[k] = self.metric.at(first + lane, k) * sums[lane];
                }
            }
            Ok::<(), Error>(())
        })?;
        for i in 0..rows {
            for k in 0..i {
                out[i * rows + k] = out[k * rows + i];
            }
        }
        Ok(out)
    }

    /// The changes of least loss: `-M^-1 b`.
    fn changes(&self, system: &[f64], slope: &[f64]) -> Result<Vec<f64>> {
        let rows = self.rows();
        let own = (0..rows).map(|r| system[r * rows + r]);
        let mean = own.clone().sum::<f64>() / rows as f64;
        let mu: Vec<f64> = collected(SCRATCH, own.map(|v| RIDGE * if v > 0.0 { v } else { mean }))?;
        let h = Symmetric::f64(system, rows)?;
        let factor = DampedFactor::<f64>::new(h, &mu, Order::Natural, self.execution)?;
        let lanes: Vec<Lane> = collected(SCRATCH, slope.iter().map(|&b| [-b; LANES]))?;
        collected(SCRATCH, factor.divide(&lanes)?.iter().map(|lane| lane[0]))
    }

    /// Brings errors and gradient up to date with changed scales of a group.
    fn follow(&mut self, gradient: &mut [Vec<Lane>], columns: &Range<usize>, change: &[f64]) -> Result<()> {
        let (dim, isa, values) = (self.w.dim(), self.isa, &self.values);
        let rows = collected(SCRATCH, columns.clone().map(|j| self.s.row(j)))?;
        gradient.par_iter_mut().zip(&mut self.errors).enumerate().try_for_each(
            |(tile, (gradient, errors))| {
                self.execution.check()?;
                let lane = |j: usize| {
                    std::array::from_fn(|lane| {
                        let r = tile * LANES + lane;
                        change.get(r).map_or(0.0, |by| by * values[r * dim + j])
                    })
                };
                let by: Vec<Lane> = collected(SCRATCH, columns.clone().map(lane))?;
                for (errors, by) in errors[columns.clone()].iter_mut().zip(&by) {
                    for (error, by) in errors.iter_mut().zip(by) {
                        *error += by;
                    }
                }
                add_rows(isa, gradient, &rows, &by);
                Ok(())
            },
        )
    }
}

/// The values of a tile, and zeros in lanes without a row.
fn lane_of(values: &[f64]) -> Lane {
    std::array::from_fn(|lane| values.get(lane).copied().unwrap_or(0.0))
}
