//! The scale search: one for every solver, with either sign or one, over many rows at a time.
//!
//! The scale of a group comes from its largest magnitude, or is the best of 70 shrunken candidates, `1 - k / 100` of
//! the largest, by the weighted square error of the rounded values. This is the shrink grid of the code published with
//! GPTQ, with an exponent of 2 instead of 2.4. Rows lie side by side, one *lane* each, so that a step of the search is
//! a few vector instructions for all of them.

use crate::grid::{by_steps, fit_units, Grid, GroupScale, Search, Steps, Values};
use crate::simd::{per_isa, Isa, Real};
use crate::Error;

/// Scales tried by [`Search::Mse`].
pub const SHRINK_STEPS: usize = 70;

/// Fits one scale per lane and group to `lines`, columns of `lanes` values each. `weights` are the weights of the
/// columns' errors. The columns belong to one group, or to groups that share units. Lanes of a group lie together.
///
/// Scales that the stored type cannot hold are left out. A lane with values too large for every scale is an error that
/// names the lane.
pub(crate) fn fit<T: Real>(
    isa: Isa,
    grid: &Grid,
    lines: &[T],
    lanes: usize,
    weights: &[f64],
) -> std::result::Result<Vec<GroupScale>, (usize, Error)> {
    if let Some(units) = grid.units() {
        return fit_units(isa, (grid, units), lines, lanes, weights);
    }
    let (mut low, mut high) = (vec![0.0; lanes], vec![0.0; lanes]);
    for line in lines.chunks_exact(lanes) {
        widen(isa, line, &mut low, &mut high);
    }
    let signs: &[f32] = if grid.signed && grid.symmetric { &[1.0, -1.0] } else { &[1.0] };
    let steps = match grid.search {
        Search::Max | Search::HalfRange => 1,
        Search::Mse => SHRINK_STEPS,
    };
    let mut best: Vec<Option<GroupScale>> = vec![None; lanes];
    let rounding = grid.rounding();
    let (mut costs, mut least) = (vec![0.0; lanes], vec![0.0; lanes]);
    let mut tried = Candidates { found: vec![None; lanes], scale: vec![0.0; lanes], zero: vec![0.0; lanes] };
    for (&sign, k) in signs.iter().flat_map(|sign| (0..steps).map(move |k| (sign, k))) {
        tried.take(grid, &low, &high, sign, 1.0 - k as f64 / 100.0);
        if signs.len() * steps > 1 {
            costs.fill(0.0);
            for (line, &weight) in lines.chunks_exact(lanes).zip(weights) {
                by_steps!(&rounding, |steps| add_costs(isa, line, weight, &tried, steps, &mut costs));
            }
        }
        for lane in 0..lanes {
            if tried.found[lane].is_some() && (best[lane].is_none() || costs[lane] < least[lane]) {
                (best[lane], least[lane]) = (tried.found[lane], costs[lane]);
            }
        }
    }
    let found = best.into_iter().enumerate();
    found.map(|(l, one)| one.map_or_else(|| fallback(grid, l, low[l], high[l]), Ok)).collect()
}

/// The scale of a lane that has no candidate. Zeros, and values too small for any scale of the stored type, become
/// zeros (or nearly so, where no level is zero). Values that are too large have no scale.
fn fallback(
    grid: &Grid,
    lane: usize,
    low: f64,
    high: f64,
) -> std::result::Result<GroupScale, (usize, Error)> {
    let value = grid.widest(low, high);
    if grid.scale_type.round(value) == 0.0 {
        let without_zero =
            matches!(grid.values, Values::Table(table) if !table.bytes()[..table.len()].contains(&0));
        return Ok(GroupScale {
            scale: if without_zero { grid.scale_type.least() } else { grid.scale_type.some() },
            zero: if grid.symmetric { grid.middle() } else { 0 },
            ..GroupScale::default()
        });
    }
    Err((lane, Error::ScaleRange { row: 0, group: 0, value, dtype: grid.scale_type.name() }))
}

impl Grid {
    /// The scale at which nothing between `low <= 0` and `high >= 0` is clipped. Without signs it is the published one,
    /// which leaves the lowest code unused; by half the range it clips up to half a step.
    pub(super) fn widest(&self, low: f64, high: f64) -> f64 {
        if !self.symmetric {
            return (high - low) / f64::from(self.top());
        }
        if let Some(table) = self.table() {
            let (below, above) = table.ends();
            return (high / above).max(low / below);
        }
        if self.search == Search::HalfRange {
            return high.max(-low) / (f64::from(self.top()) / 2.0);
        }
        let above = f64::from(self.middle() - 1);
        if self.signed {
            (high / above).max(-low / f64::from(self.middle()))
        } else {
            high.max(-low) / above
        }
    }

    /// A shrunken scale with the given sign and its zero point; nothing for a group of zeros, or where the stored type
    /// cannot hold the scale.
    fn candidate(&self, low: f64, high: f64, sign: f32, shrink: f64) -> Option<GroupScale> {
        if low == 0.0 && high == 0.0 {
            return None;
        }
        let (low, high) = if sign > 0.0 { (low, high) } else { (-high, -low) };
        let scale = self.scale_type.round(self.widest(low, high) * shrink);
        if scale == 0.0 || !scale.is_finite() {
            return None;
        }
        let zero = if self.symmetric {
            self.middle()
        } else {
            (-low * shrink / f64::from(scale)).round_ties_even().clamp(0.0, f64::from(self.top())) as u8
        };
        Some(GroupScale { scale: scale * sign, zero, ..GroupScale::default() })
    }
}

/// One candidate per lane; a lane without one has some numbers that are not looked at.
struct Candidates {
    found: Vec<Option<GroupScale>>,
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl Candidates {
    fn take(&mut self, grid: &Grid, low: &[f64], high: &[f64], sign: f32, shrink: f64) {
        for lane in 0..low.len() {
            let found = grid.candidate(low[lane], high[lane], sign, shrink);
            self.found[lane] = found;
            (self.scale[lane], self.zero[lane]) = found.map_or((1.0, 0.0), |l| (l.scale, f32::from(l.zero)));
        }
    }
}

per_isa! {
    /// Takes one value per lane into the lanes' ranges.
    fn widen<T: Real>(line: &[T], low: &mut [f64], high: &mut [f64]) = widen_body;
}

#[inline(always)]
fn widen_body<T: Real>(line: &[T], low: &mut [f64], high: &mut [f64]) {
    for ((&v, low), high) in line.iter().zip(low).zip(high) {
        *low = low.min(v.wide());
        *high = high.max(v.wide());
    }
}

per_isa! {
    /// Adds the weighted square errors of one column, at one scale per lane, to `costs`.
    fn add_costs<T: Real, S: Steps>(line: &[T], weight: f64, tried: &Candidates, steps: S, costs: &mut [f64])
        = costs_body;
}

#[inline(always)]
fn costs_body<T: Real, S: Steps>(line: &[T], weight: f64, tried: &Candidates, steps: S, costs: &mut [f64]) {
    let n = line.len();
    let (scale, zero, costs) = (&tried.scale[..n], &tried.zero[..n], &mut costs[..n]);
    for i in 0..n {
        let value = line[i].wide();
        let code = steps.code(value / f64::from(scale[i]), f64::from(zero[i]));
        let gap = value - f64::from(steps.step(code as f32, zero[i]) * scale[i]);
        costs[i] += weight * gap * gap;
    }
}
