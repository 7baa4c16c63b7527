//! Scales and zero points of a batch of rows.

use crate::grid::{fit, Grid, Level};
use crate::memory::zeros;
use crate::simd::Isa;
use crate::weight::Weight;
use crate::Result;

/// What the memory of a batch is for.
const SCRATCH: &str = "scales of some rows";

/// Levels of a batch, group by group, one lane per row.
pub(crate) struct Levels {
    n: usize,
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl Levels {
    /// Levels of `n` rows that are still to be set.
    pub(crate) fn unset(n: usize, n_groups: usize) -> Result<Self> {
        Ok(Self { n, scale: zeros(SCRATCH, n * n_groups)?, zero: zeros(SCRATCH, n * n_groups)? })
    }

    /// Levels from the original weights of rows `first..`, errors of columns weighted.
    pub(crate) fn fitted(
        w: Weight<'_>,
        first: usize,
        grid: &Grid,
        weights: &[f64],
        isa: Isa,
    ) -> Result<Self> {
        let (n, dim) = (w.rows(), w.dim());
        let group = grid.group(dim);
        let mut levels = Self::unset(n, grid.n_groups(dim))?;
        let mut lines: Vec<f32> = zeros(SCRATCH, n * group.min(dim))?;
        for (g, from) in (0..dim).step_by(group).enumerate() {
            let to = dim.min(from + group);
            for (r, row) in w.values().chunks_exact(dim).enumerate() {
                for (c, &v) in row[from..to].iter().enumerate() {
                    lines[c * n + r] = v;
                }
            }
            let fitted = fit(isa, grid, &lines[..(to - from) * n], n, &weights[from..to])
                .map_err(|(lane, e)| e.located(first + lane, g))?;
            for (lane, level) in fitted.into_iter().enumerate() {
                levels.set(g, lane, level);
            }
        }
        Ok(levels)
    }

    /// Levels of `n` rows from (rows, groups) arrays.
    pub(crate) fn load(n: usize, scales: &[f32], zeros: &[u8]) -> Result<Self> {
        let n_groups = scales.len() / n.max(1);
        let mut levels = Self::unset(n, n_groups)?;
        for r in 0..n {
            for g in 0..n_groups {
                levels.set(g, r, Level { scale: scales[r * n_groups + g], zero: zeros[r * n_groups + g] });
            }
        }
        Ok(levels)
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

    /// Sets the level of one lane in group `g`.
    pub(crate) fn set(&mut self, g: usize, lane: usize, level: Level) {
        self.scale[g * self.n + lane] = level.scale;
        self.zero[g * self.n + lane] = f32::from(level.zero);
    }

    /// Copies to the (rows, groups) arrays of the result.
    pub(crate) fn store(&self, scales: &mut [f32], zeros: &mut [u8]) {
        let n_groups = self.scale.len() / self.n.max(1);
        for r in 0..self.n {
            for g in 0..n_groups {
                scales[r * n_groups + g] = self.scale[g * self.n + r];
                zeros[r * n_groups + g] = self.zero[g * self.n + r] as u8;
            }
        }
    }
}
