//! One batch of rows on its way through the columns.
//!
//! Vectors run over rows. Line `j` of a vector holds column `j` of `T::NR` rows: first the updated weight, later the
//! error `w - q`. Columns are updated in octets of `MR`. Each octet records the last row of `A` that has been applied.
//! So updates can take long strides left of the block and short ones inside it, always along the same chain.

use crate::factor::{DampedFactor, PANEL_WIDTH};
use crate::gptq::beam::{Beam, Block, Row, Strips, BLOCK, SCRATCH};
use crate::gptq::column::{round_column, Column};
use crate::gptq::{Options, Scales};
use crate::grid::{by_steps, fit, Grid, GroupScale, GroupScales, Rounding};
use crate::memory::{collected, copied, zeros};
use crate::simd::{axpy, Real, MR};
use crate::weight::Weight;
use crate::{Execution, Result};

/// Rows of `A` in one stride of the long update: their share of `A` and of the errors fits the second-level cache.
const STRIDE: usize = 256;

/// Data shared by all batches.
pub(super) struct Problem<'a, T> {
    pub(super) factor: &'a DampedFactor<T>,
    pub(super) grid: &'a Grid,
    pub(super) rounding: &'a Rounding,
    pub(super) options: &'a Options,
    /// Weights of the scale search, by column of `H`.
    pub(super) weights: &'a [f64],
}

pub(super) struct Batch<'a, T> {
    problem: &'a Problem<'a, T>,
    w: Weight<'a>,
    dim: usize,
    first: usize,
    vectors: Vec<Vector<T>>,
    scales: GroupScales,
}

/// `T::NR` rows.
struct Vector<T> {
    /// Weights or errors in lines of `T::NR`; `dim` is padded to whole octets.
    values: Vec<T>,
    /// Original weights of the columns being worked on.
    original: Vec<f32>,
    codes: Vec<u8>,
    damped: Vec<f64>,
    added: Vec<f64>,
    /// Per octet: rows of `A` that have been applied.
    done: Vec<usize>,
}

impl<'a, T: Real> Batch<'a, T> {
    /// Rows `first..` of the weight, with their scales where these are known beforehand.
    pub(super) fn new(
        problem: &'a Problem<'a, T>,
        w: Weight<'a>,
        first: usize,
        known: Option<&[GroupScale]>,
    ) -> Result<Self> {
        let (grid, isa) = (problem.grid, problem.options.isa);
        let scales = match (known, problem.options.scales) {
            (Some(known), _) => GroupScales::load(w.rows(), known)?,
            (None, Scales::Static) => GroupScales::fitted(w, first, grid, problem.weights, isa)?,
            (None, Scales::Group) => GroupScales::unset(w.rows(), grid.n_groups(w.dim()))?,
        };
        Ok(Self { problem, w, dim: w.dim(), first, vectors: Vec::new(), scales })
    }

    fn n(&self) -> usize {
        self.w.rows()
    }

    /// Rounds all columns; codes are (rows, dim).
    pub(super) fn solve(mut self, codes: &mut [u8], execution: &Execution<'_>) -> Result<Self> {
        let (dim, problem) = (self.dim, self.problem);
        self.vectors = (0..self.n().div_ceil(T::NR)).map(|v| self.load(v)).collect::<Result<_>>()?;
        if problem.options.beam > 1 {
            self.search(execution)?;
        } else {
            self.sweep(execution)?;
        }
        for (v, vector) in self.vectors.iter().enumerate() {
            for (lane, row) in codes.chunks_exact_mut(dim).skip(v * T::NR).take(T::NR).enumerate() {
                for j in 0..dim {
                    row[problem.factor.order()[j]] = vector.codes[j * T::NR + lane];
                }
            }
        }
        Ok(self)
    }

    /// One code a column: the nearest.
    fn sweep(&mut self, execution: &Execution<'_>) -> Result<()> {
        let dim = self.dim;
        let block = self.problem.options.block_size.next_multiple_of(MR).min(dim.next_multiple_of(MR));
        for from in (0..dim).step_by(block) {
            let to = dim.min(from + block);
            self.update(from, from, to);
            for octet in (from..to).step_by(MR) {
                self.octet(octet, to.min(octet + MR))?;
            }
            execution.check()?;
        }
        Ok(())
    }

    /// Several paths a row; the codes of a block are decided when the block after it has been searched.
    fn search(&mut self, execution: &Execution<'_>) -> Result<()> {
        let Problem { factor, rounding, options, .. } = self.problem;
        let (dim, n) = (self.dim, self.n());
        let mut beams: Vec<Beam> = (0..n).map(|_| Beam::new(options.beam)).collect::<Result<_>>()?;
        let units = collected(SCRATCH, (0..n).map(|r| power_of_two(self.scales.mean_scale(r))))?;
        let mean_pivot = factor.pivots().iter().sum::<f64>() / dim as f64;
        let pivot_unit = f64::from(power_of_two(mean_pivot as f32));
        let mut a: Vec<Strips> = zeros(SCRATCH, 2 * BLOCK)?;
        for from in (0..dim).step_by(BLOCK) {
            let (before, to) = (from.saturating_sub(BLOCK), dim.min(from + BLOCK));
            for (r, beam) in beams.iter_mut().enumerate() {
                let codes = beam.decide();
                if before > 0 {
                    self.decided(r, before - BLOCK, &codes);
                }
            }
            self.update(before, from, to);
            for (at, entry) in a.as_flattened_mut().as_flattened_mut().iter_mut().enumerate() {
                let (i, j) = ((from + at / BLOCK).wrapping_sub(BLOCK), from + at % BLOCK);
                *entry = if i < j && j < dim { factor.entry(i, j).wide() as f32 } else { 0.0 };
            }
            let pivots = factor.pivots()[from..to].iter().map(|p| (p / pivot_unit) as f32);
            let pivots = collected(SCRATCH, pivots)?;
            by_steps!(rounding, |steps| {
                let block = Block { a: &a, pivots: &pivots, steps, isa: options.isa };
                for (r, (beam, &unit)) in beams.iter_mut().zip(&units).enumerate() {
                    execution.check()?;
                    beam.advance(&block, &self.row(r, from, to, unit));
                }
            });
        }
        let last = (dim - 1) / BLOCK * BLOCK;
        for (r, (beam, &unit)) in beams.iter_mut().zip(&units).enumerate() {
            let codes = beam.decide();
            if last > 0 {
                self.decided(r, last - BLOCK, &codes);
            }
            self.decided(r, last, &beam.decide()[..dim - last]);
            self.vectors[r / T::NR].damped[r % T::NR] = beam.spent() * pivot_unit * f64::from(unit).powi(2);
        }
        Ok(())
    }

    /// Columns `from..to` of a row as a beam takes them, with those of the block before.
    fn row(&self, r: usize, from: usize, to: usize, unit: f32) -> Row {
        let (factor, group) = (self.problem.factor, self.problem.grid.group(self.dim));
        let (vector, lane) = (&self.vectors[r / T::NR], r % T::NR);
        let mut row = Row {
            original: [0.0; 2 * BLOCK],
            scale: [0.0; 2 * BLOCK],
            zero: [0.0; 2 * BLOCK],
            updated: Strips::default(),
        };
        for j in from.saturating_sub(BLOCK)..to {
            let (scale, zero) = self.scales.lanes(factor.order()[j] / group, r, 1);
            let at = j + BLOCK - from;
            row.original[at] = vector.original[j * T::NR + lane] / unit;
            (row.scale[at], row.zero[at]) = (scale[0] / unit, zero[0]);
            if j >= from {
                row.updated.as_flattened_mut()[j - from] =
                    (vector.values[j * T::NR + lane].wide() / f64::from(unit)) as f32;
            }
        }
        row
    }

    /// Takes over codes of a row from column `from` on, and their errors.
    fn decided(&mut self, r: usize, from: usize, codes: &[u8]) {
        let Problem { factor, grid, rounding, .. } = self.problem;
        let (lane, group) = (r % T::NR, grid.group(self.dim));
        let vector = &mut self.vectors[r / T::NR];
        for (j, &code) in (from..).zip(codes) {
            let (column, at) = (factor.order()[j], j * T::NR + lane);
            let (scale, zero) = self.scales.lanes(column / group, r, 1);
            let value = rounding.step(code, zero[0]) * scale[0];
            let error = T::of(f64::from(vector.original[at])) - T::of(f64::from(value));
            (vector.codes[at], vector.values[at]) = (code, error);
            vector.added[lane] += factor.mu()[column] * (error.wide() * error.wide());
        }
    }

    fn load(&self, v: usize) -> Result<Vector<T>> {
        let problem = self.problem;
        let padded = self.dim.next_multiple_of(MR);
        let (what, group) = ("rows that are solved together", problem.grid.group(self.dim));
        let mut values = zeros(what, padded * T::NR)?;
        let mut original = zeros(what, padded * T::NR)?;
        for (lane, row) in self.w.values().chunks_exact(self.dim).skip(v * T::NR).take(T::NR).enumerate() {
            for j in 0..self.dim {
                let column = problem.factor.order()[j];
                let weight = row[column] - self.scales.offset(column / group, v * T::NR + lane);
                values[j * T::NR + lane] = T::of(f64::from(weight));
                original[j * T::NR + lane] = weight;
            }
        }
        Ok(Vector {
            values,
            original,
            codes: zeros(what, self.dim * T::NR)?,
            damped: vec![0.0; T::NR],
            added: vec![0.0; T::NR],
            done: zeros(what, padded / MR)?,
        })
    }

    /// Brings columns `from..to` up to date with all errors of columns before `limit`.
    fn update(&mut self, limit: usize, from: usize, to: usize) {
        let octets = from / MR..to.div_ceil(MR);
        let mut start =
            octets.clone().flat_map(|o| self.vectors.iter().map(move |v| v.done[o])).min().unwrap_or(limit);
        while start < limit {
            let stop = limit.min(start + STRIDE);
            for vector in &mut self.vectors {
                for o in octets.clone() {
                    vector.apply(o, stop, self.problem);
                }
            }
            start = stop;
        }
    }

    /// Rounds the columns of one octet.
    fn octet(&mut self, from: usize, to: usize) -> Result<()> {
        let block = self.problem.grid.block(self.dim);
        self.update(from, from, to);
        for j in from..to {
            if self.problem.options.scales == Scales::Group && j % block == 0 {
                self.begin_group(j)?;
            }
            for v in 0..self.vectors.len() {
                self.round(v, j, to);
            }
        }
        Ok(())
    }

    fn round(&mut self, v: usize, j: usize, to: usize) {
        let Problem { factor, grid, rounding, options, .. } = self.problem;
        let (nr, column) = (T::NR, factor.order()[j]);
        let g = column / grid.group(self.dim);
        let lanes = nr.min(self.n() - v * nr);
        let (scale, zero) = self.scales.lanes(g, v * nr, lanes);
        let vector = &mut self.vectors[v];
        let (line, later) = vector.values[j * nr..].split_at_mut(nr);
        by_steps!(rounding, |steps| round_column(
            options.isa,
            Column {
                values: &mut line[..lanes],
                original: &vector.original[j * nr..],
                scale,
                zero,
                codes: &mut vector.codes[j * nr..],
                damped: &mut vector.damped,
                added: &mut vector.added,
                pivot: factor.pivots()[j],
                mu: factor.mu()[column],
                steps,
            },
        ));
        let a = factor.lines(j, j);
        for k in j + 1..to {
            axpy(options.isa, a[k - j], line, &mut later[(k - j - 1) * nr..(k - j) * nr]);
        }
        vector.done[j / MR] = j + 1;
    }

    /// Takes the scales of the group that begins at column `from`, or of those that share units, from the weights as they now
    /// are. From here on the lines hold weights without their offsets.
    fn begin_group(&mut self, from: usize) -> Result<()> {
        let Problem { grid, options, weights, .. } = self.problem;
        let group = grid.group(self.dim);
        let to = self.dim.min(from + grid.block(self.dim));
        self.update(from, from, to);
        for v in 0..self.vectors.len() {
            let lanes = T::NR.min(self.n() - v * T::NR);
            let lines = self.vectors[v].group_start(from, to, self.problem)?;
            let fitted = fit(options.isa, grid, &lines, T::NR, &weights[from..to])
                .map_err(|(lane, e)| e.located(self.first + v * T::NR + lane, from / group))?;
            for (at, &one) in fitted.iter().enumerate().filter(|(at, _)| at % T::NR < lanes) {
                self.scales.set(from / group + at / T::NR, v * T::NR + at % T::NR, one);
            }
            let Vector { values, original, .. } = &mut self.vectors[v];
            for (at, j) in (from..to).flat_map(|j| (0..lanes).map(move |lane| (j * T::NR + lane, j))) {
                let offset = self.scales.offset(j / group, v * T::NR + at % T::NR);
                values[at] = values[at] - T::of(f64::from(offset));
                original[at] -= offset;
            }
        }
        Ok(())
    }

    pub(super) fn store(&self, scales: &mut [GroupScale]) {
        self.scales.store(scales);
    }

    /// Damped proxy of each row, and what of it the damping adds.
    pub(super) fn costs(&self) -> Vec<(f64, f64)> {
        let all = self.vectors.iter().flat_map(|v| v.damped.iter().copied().zip(v.added.iter().copied()));
        all.take(self.n()).collect()
    }
}

impl<T: Real> Vector<T> {
    /// Adds the errors of columns `done..limit` to an octet.
    fn apply(&mut self, octet: usize, limit: usize, problem: &Problem<'_, T>) {
        let (start, nr, c) = (self.done[octet], T::NR, octet * MR);
        if start >= limit {
            return;
        }
        let (errors, rest) = self.values.split_at_mut(c.max(limit) * nr);
        // Inside an octet columns are updated one by one, so a stride never ends inside its own octet.
        debug_assert!(limit <= c);
        let a = problem.factor.lines(start, c);
        T::tile(problem.options.isa, limit - start, a, PANEL_WIDTH, &errors[start * nr..], nr, rest, nr);
        self.done[octet] = limit;
    }

    /// Columns `from..to` as GPTQ sees them when it reaches `from`: the best real-valued continuation,
    /// `w + (E A) A_gg^-1` with `A_gg` the unit upper triangle inside the group.
    fn group_start(&self, from: usize, to: usize, problem: &Problem<'_, T>) -> Result<Vec<T>> {
        let (nr, n) = (T::NR, to - from);
        let mut lines = copied("a group of columns", &self.values[from * nr..to * nr])?;
        if from == 0 {
            return Ok(lines);
        }
        let original = &self.original[from * nr..to * nr];
        for (shift, &w) in lines.iter_mut().zip(original) {
            *shift = *shift - T::of(f64::from(w));
        }
        for i in 0..n {
            let (line, later) = lines[i * nr..].split_at_mut(nr);
            let mut k = i + 1;
            while k < n {
                let a = problem.factor.lines(from + i, from + k);
                let m = (n - k).min(PANEL_WIDTH - (from + k) % PANEL_WIDTH);
                for (c, &entry) in a[..m].iter().enumerate() {
                    let at = (k + c - i - 1) * nr;
                    axpy(problem.options.isa, -entry, line, &mut later[at..at + nr]);
                }
                k += m;
            }
        }
        for (shift, &w) in lines.iter_mut().zip(original) {
            *shift = T::of(f64::from(w)) + *shift;
        }
        Ok(lines)
    }
}

/// The power of two below a positive number.
fn power_of_two(x: f32) -> f32 {
    let below = f32::from_bits(x.to_bits() & 0x7f80_0000);
    if below.is_normal() {
        below
    } else {
        1.0
    }
}
