//! Scales and zero points of a batch of rows.

use crate::grid::{Grid, Level, Search, SHRINK_STEPS};
use crate::simd::{lane_cost, lane_range, Isa, Lanes, Real};
use crate::solve::located;
use crate::Result;

/// Levels of a batch, group by group, one lane per row.
pub(crate) struct Levels {
    n: usize,
    pub(crate) scale: Vec<f32>,
    pub(crate) zero: Vec<f32>,
}

impl Levels {
    pub(crate) fn unset(n: usize, n_groups: usize) -> Self {
        Self { n, scale: vec![1.0; n * n_groups], zero: vec![0.0; n * n_groups] }
    }

    /// Lanes `from..from + len` of group `g`.
    pub(crate) fn lanes(&self, g: usize, from: usize, len: usize) -> (&[f32], &[f32]) {
        let at = g * self.n + from;
        (&self.scale[at..at + len], &self.zero[at..at + len])
    }

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

/// Fits one level per lane to `lines` (columns of `lanes` values each).
pub(crate) fn fit_lanes<T: Real>(
    isa: Isa,
    grid: &Grid,
    lines: &[T],
    lanes: usize,
    weights: &[f64],
) -> std::result::Result<Vec<Level>, (usize, crate::Error)> {
    let (mut low, mut high) = (vec![0.0; lanes], vec![0.0; lanes]);
    for line in lines.chunks_exact(lanes) {
        lane_range(isa, line, &mut low, &mut high);
    }
    let mut best = Vec::with_capacity(lanes);
    for lane in 0..lanes {
        best.push(grid.widest(low[lane], high[lane]).map_err(|e| (lane, e))?);
    }
    if grid.search == Search::Max {
        return Ok(best);
    }
    let mut least = vec![f64::INFINITY; lanes];
    for k in 0..SHRINK_STEPS {
        let tried: Vec<Level> =
            (0..lanes).map(|l| grid.shrunk(low[l], high[l], k).unwrap_or(best[l])).collect();
        let scale: Vec<f32> = tried.iter().map(|t| t.scale).collect();
        let zero: Vec<f32> = tried.iter().map(|t| f32::from(t.zero)).collect();
        let mut costs = vec![0.0; lanes];
        for (line, &weight) in lines.chunks_exact(lanes).zip(weights) {
            let levels = Lanes { scale: &scale, zero: &zero };
            lane_cost(isa, line, weight, &levels, f64::from(grid.top()), &mut costs);
        }
        for lane in 0..lanes {
            if costs[lane] < least[lane] {
                least[lane] = costs[lane];
                best[lane] = tried[lane];
            }
        }
    }
    Ok(best)
}

/// Levels from the original weights (n, dim) of rows `first..`.
pub(crate) fn static_levels(
    w: &[f32],
    dim: usize,
    first: usize,
    grid: &Grid,
    weights: &[f64],
    isa: Isa,
) -> Result<Levels> {
    let (group, n) = (grid.group(dim), w.len() / dim);
    let mut levels = Levels::unset(n, grid.n_groups(dim));
    let mut lines = vec![0.0_f32; n * group.min(dim)];
    for (g, from) in (0..dim).step_by(group).enumerate() {
        let to = dim.min(from + group);
        for (r, row) in w.chunks_exact(dim).enumerate() {
            for (c, &v) in row[from..to].iter().enumerate() {
                lines[c * n + r] = v;
            }
        }
        let fitted = fit_lanes(isa, grid, &lines[..(to - from) * n], n, &weights[from..to])
            .map_err(|(lane, e)| located(e, first + lane, g))?;
        for (lane, level) in fitted.into_iter().enumerate() {
            levels.set(g, lane, level);
        }
    }
    Ok(levels)
}
