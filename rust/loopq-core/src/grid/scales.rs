//! Scales and zero points of a batch of rows.

use crate::grid::{fit, Grid, GroupScale};
use crate::memory::{collected, zeros};
use crate::simd::Isa;
use crate::weight::Weight;
use crate::Result;

/// Name of a batch's memory in errors.
const SCRATCH: &str = "scales of some rows";

/// Scales and zero points of a batch, group by group, one lane per row.
pub(crate) struct GroupScales {
    n: usize,
    all: Vec<GroupScale>,
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl GroupScales {
    /// Those of `n` rows that are still to be set.
    pub(crate) fn unset(n: usize, n_groups: usize) -> Result<Self> {
        let all = collected(SCRATCH, (0..n * n_groups).map(|_| GroupScale::default()))?;
        Ok(Self { n, all, scale: zeros(SCRATCH, n * n_groups)?, zero: zeros(SCRATCH, n * n_groups)? })
    }

    /// Those from the original weights of rows `first..`, errors of columns weighted.
    pub(crate) fn fitted(
        w: Weight<'_>,
        first: usize,
        grid: &Grid,
        weights: &[f64],
        isa: Isa,
    ) -> Result<Self> {
        let (n, dim) = (w.rows(), w.dim());
        let block = grid.block(dim);
        let mut scales = Self::unset(n, grid.n_groups(dim))?;
        let mut lines: Vec<f32> = zeros(SCRATCH, n * block.min(dim))?;
        for from in (0..dim).step_by(block) {
            let (to, g) = (dim.min(from + block), from / grid.group(dim));
            for (r, row) in w.values().chunks_exact(dim).enumerate() {
                for (c, &v) in row[from..to].iter().enumerate() {
                    lines[c * n + r] = v;
                }
            }
            let fitted = fit(isa, grid, &lines[..(to - from) * n], n, &weights[from..to])
                .map_err(|(lane, e)| e.located(first + lane, g))?;
            for (at, found) in fitted.into_iter().enumerate() {
                scales.set(g + at / n, at % n, found);
            }
        }
        Ok(scales)
    }

    /// Those of `n` rows from those (rows, groups).
    pub(crate) fn load(n: usize, known: &[GroupScale]) -> Result<Self> {
        let n_groups = known.len() / n.max(1);
        let mut scales = Self::unset(n, n_groups)?;
        for (at, &found) in known.iter().enumerate() {
            scales.set(at % n_groups, at / n_groups, found);
        }
        Ok(scales)
    }

    /// The offset added to the values of a lane in group `g`.
    pub(crate) fn offset(&self, g: usize, lane: usize) -> f32 {
        self.all[g * self.n + lane].offset
    }

    /// Lanes `from..from + len` of group `g`: scales and zero points.
    pub(crate) fn lanes(&self, g: usize, from: usize, len: usize) -> (&[f32], &[f32]) {
        let at = g * self.n + from;
        (&self.scale[at..at + len], &self.zero[at..at + len])
    }

    /// Mean size of the scales of a lane.
    pub(crate) fn mean_scale(&self, lane: usize) -> f32 {
        let scales = self.scale.iter().skip(lane).step_by(self.n);
        let (sum, n) = scales.fold((0.0, 0), |(sum, n), s| (sum + f64::from(s.abs()), n + 1));
        (sum / f64::from(n)) as f32
    }

    /// Sets the scale of one lane in group `g`.
    pub(crate) fn set(&mut self, g: usize, lane: usize, found: GroupScale) {
        let at = g * self.n + lane;
        (self.all[at], self.scale[at], self.zero[at]) = (found, found.scale, f32::from(found.zero));
    }

    /// Copies to the (rows, groups) scales of the result.
    pub(crate) fn store(&self, scales: &mut [GroupScale]) {
        let n_groups = self.all.len() / self.n.max(1);
        for (at, to) in scales.iter_mut().enumerate() {
            *to = self.all[at % n_groups * self.n + at / n_groups];
        }
    }
}
