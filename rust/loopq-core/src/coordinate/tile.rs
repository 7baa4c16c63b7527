//! Eight rows of a weight on their way through the stages.

use crate::coordinate::{Problem, SCRATCH};
use crate::lanes::{Lane, LANES};
use crate::memory::{self, collected};
use crate::Result;

/// Tiles that are taken through the columns together: reading `S` once for all of them keeps the solver out of main memory.
pub(super) const TILES: usize = 8;

/// Eight rows: where they stand, by column, and the gradient of their loss.
pub(super) struct Tile {
    /// What codes stand for, in scales.
    pub(super) steps: Vec<Lane>,
    /// What they stand for.
    pub(super) values: Vec<Lane>,
    /// `(W^ - W) S`.
    pub(super) gradient: Vec<Lane>,
    /// By group.
    pub(super) scales: Vec<[f32; LANES]>,
    /// By group.
    pub(super) zeros: Vec<Lane>,
    pub(super) loss: Lane,
    /// Rows that are not done.
    pub(super) active: [bool; LANES],
}

impl Tile {
    /// Rows from `first` on, of `rows`. Lanes without a row hold zeros and are done.
    pub(super) fn new(
        problem: &Problem<'_>,
        (codes, scale, zero): (&[u8], &[f32], &[u8]),
        first: usize,
        rows: usize,
    ) -> Result<Self> {
        let (dim, groups) = (problem.dim, problem.grid.n_groups(problem.dim));
        let at = |g: usize, r: usize| (first + r) * groups + g;
        let live = |r: usize| first + r < rows;
        let scale = |g: usize| std::array::from_fn(|r| if live(r) { scale[at(g, r)] } else { 1.0 });
        let scales: Vec<[f32; LANES]> = collected(SCRATCH, (0..groups).map(scale))?;
        let zero = |g: usize| std::array::from_fn(|r| if live(r) { f64::from(zero[at(g, r)]) } else { 0.0 });
        let zeros: Vec<Lane> = collected(SCRATCH, (0..groups).map(zero))?;
        let step = |j: usize, r: usize| {
            let zero = zeros[problem.group_of(j)][r] as f32;
            f64::from(problem.rounding.step(codes[(first + r) * dim + j], zero))
        };
        let lane = |j: usize| std::array::from_fn(|r| if live(r) { step(j, r) } else { 0.0 });
        let steps: Vec<Lane> = collected(SCRATCH, (0..dim).map(lane))?;
        let value = |(j, steps): (usize, &Lane)| values_of(steps, &scales[problem.group_of(j)]);
        let values = collected(SCRATCH, steps.iter().enumerate().map(value))?;
        let active = std::array::from_fn(live);
        let (gradient, loss) = (memory::zeros(SCRATCH, dim)?, [0.0; LANES]);
        Ok(Self { steps, values, gradient, scales, zeros, loss, active })
    }

    pub(super) fn is_active(&self) -> bool {
        self.active.contains(&true)
    }

    /// Writes lane `r` as a row of codes and one of scales.
    pub(super) fn store(&self, problem: &Problem<'_>, r: usize, codes: &mut [u8], scales: &mut [f32]) {
        for (j, to) in codes.iter_mut().enumerate() {
            *to = problem.rounding.code(self.steps[j][r], self.zeros[problem.group_of(j)][r]);
        }
        for (to, scales) in scales.iter_mut().zip(&self.scales) {
            *to = scales[r];
        }
    }
}

/// Values of the steps of one column.
pub(super) fn values_of(steps: &Lane, scale: &[f32; LANES]) -> Lane {
    std::array::from_fn(|r| f64::from(steps[r] as f32 * scale[r]))
}
