//! Eight rows of a weight on their way through the stages.

use crate::coordinate::{Problem, SCRATCH};
use crate::grid::GroupScale;
use crate::lanes::{Lane, LANES};
use crate::memory::{self, collected};
use crate::Result;

/// Tiles that are taken through the columns together: reading `S` once for all of them keeps the solver out of main memory.
pub(super) const TILES: usize = 8;

/// Eight rows: where they stand, by column, and the gradient of their loss.
pub(super) struct Tile {
    /// Decoded codes in units of the scale.
    pub(super) steps: Vec<Lane>,
    /// Decoded codes times the scale.
    pub(super) values: Vec<Lane>,
    /// `(W^ - W) S`.
    pub(super) gradient: Vec<Lane>,
    /// By group.
    pub(super) scales: Vec<[f32; LANES]>,
    /// By group.
    pub(super) zeros: Vec<Lane>,
    /// Added to all values of a group.
    pub(super) offsets: Vec<Lane>,
    /// By group.
    pub(super) units: Vec<[[f32; 2]; LANES]>,
    pub(super) loss: Lane,
    /// Rows that are not done.
    pub(super) active: [bool; LANES],
}

impl Tile {
    /// Rows from `first` on, of `rows`. Lanes without a row hold zeros and are done.
    pub(super) fn new(
        problem: &Problem<'_>,
        (codes, known): (&[u8], &[GroupScale]),
        first: usize,
        rows: usize,
    ) -> Result<Self> {
        let (dim, groups) = (problem.dim, problem.grid.n_groups(problem.dim));
        let live = |r: usize| first + r < rows;
        let none = GroupScale { scale: 1.0, ..GroupScale::default() };
        let at = |g: usize, r: usize| if live(r) { known[(first + r) * groups + g] } else { none };
        let scale = |g: usize| std::array::from_fn(|r| at(g, r).scale);
        let scales: Vec<[f32; LANES]> = collected(SCRATCH, (0..groups).map(scale))?;
        let zero = |g: usize| std::array::from_fn(|r| f64::from(at(g, r).zero));
        let zeros: Vec<Lane> = collected(SCRATCH, (0..groups).map(zero))?;
        let offset = |g: usize| std::array::from_fn(|r| f64::from(at(g, r).offset));
        let offsets: Vec<Lane> = collected(SCRATCH, (0..groups).map(offset))?;
        let units = (0..groups).map(|g| std::array::from_fn(|r| at(g, r).units));
        let units = collected(SCRATCH, units)?;
        let step = |j: usize, r: usize| {
            let zero = zeros[problem.group_of(j)][r] as f32;
            f64::from(problem.rounding.step(codes[(first + r) * dim + j], zero))
        };
        let lane = |j: usize| std::array::from_fn(|r| if live(r) { step(j, r) } else { 0.0 });
        let steps: Vec<Lane> = collected(SCRATCH, (0..dim).map(lane))?;
        let value = |(j, steps): (usize, &Lane)| {
            let g = problem.group_of(j);
            values_of(steps, &scales[g], &offsets[g])
        };
        let values = collected(SCRATCH, steps.iter().enumerate().map(value))?;
        let active = std::array::from_fn(live);
        let (gradient, loss) = (memory::zeros(SCRATCH, dim)?, [0.0; LANES]);
        Ok(Self { steps, values, gradient, scales, zeros, offsets, units, loss, active })
    }

    pub(super) fn is_active(&self) -> bool {
        self.active.contains(&true)
    }

    /// The scale of lane `r` in group `g`.
    pub(super) fn scale_of(&self, g: usize, r: usize) -> GroupScale {
        let (scale, units) = (self.scales[g][r], self.units[g][r]);
        GroupScale { scale, zero: self.zeros[g][r] as u8, offset: self.offsets[g][r] as f32, units }
    }

    /// Sets scale, offset and units of lane `r` in group `g`.
    pub(super) fn set(&mut self, g: usize, r: usize, one: &GroupScale) {
        (self.scales[g][r], self.units[g][r]) = (one.scale, one.units);
        self.offsets[g][r] = f64::from(one.offset);
    }

    /// Writes lane `r` as a row of codes and one of scales.
    pub(super) fn store(&self, problem: &Problem<'_>, r: usize, codes: &mut [u8], scales: &mut [GroupScale]) {
        for (j, to) in codes.iter_mut().enumerate() {
            *to = problem.rounding.code(self.steps[j][r], self.zeros[problem.group_of(j)][r]);
        }
        for (g, to) in scales.iter_mut().enumerate() {
            *to = self.scale_of(g, r);
        }
    }
}

/// Values of the steps of one column.
pub(super) fn values_of(steps: &Lane, scale: &[f32; LANES], offset: &Lane) -> Lane {
    std::array::from_fn(|r| f64::from(steps[r] as f32 * scale[r]) + offset[r])
}
