//! Scales of least loss for codes that stay: with `b_g` the code steps of group `g`, `W^ = sum_g s_g b_g`, and
//! `s = (B S B^T)^-1 B S w` for each row: weighted least squares.

use crate::coordinate::{Problem, Solution};
use crate::factor::solve_positive;
use crate::grid::Level;
use crate::lanes::{Lane, LANES};

impl Problem<'_> {
    /// Levels with refitted scales. A group without a step, or whose best scale cannot be stored, keeps its own.
    pub(super) fn refit(&self, w: &[Lane], found: &Solution) -> Vec<[Level; LANES]> {
        let (dim, n) = (self.dim, found.levels.len());
        let steps: Vec<Lane> = (0..dim)
            .map(|j| {
                let level = &found.levels[self.group_of(j)];
                std::array::from_fn(|r| f64::from(found.codes[j][r]) - f64::from(level[r].zero))
            })
            .collect();
        let mut normal = vec![[0.0; LANES]; n * n];
        let mut right = vec![[0.0; LANES]; n];
        let group = self.grid.group(dim);
        for g in 0..n {
            let first = g * group;
            let product = self.image(first, &steps[first..dim.min(first + group)]);
            for (k, lanes) in product.iter().enumerate() {
                let to = self.group_of(k);
                for r in 0..LANES {
                    normal[g * n + to][r] += lanes[r] * steps[k][r];
                    right[g][r] += lanes[r] * w[k][r];
                }
            }
        }
        let mut levels = found.levels.clone();
        for r in 0..LANES {
            let live: Vec<usize> = (0..n).filter(|&g| normal[g * n + g][r] > 0.0).collect();
            let matrix = |a: usize, b: usize| normal[live[a] * n + live[b]][r];
            let Some(scales) = solve_positive(live.len(), matrix, |a| right[live[a]][r]) else {
                continue;
            };
            for (&g, scale) in live.iter().zip(scales) {
                let stored = self.grid.scale_type.round(scale);
                let fits = stored.is_finite() && stored != 0.0 && (self.grid.signed || stored > 0.0);
                if fits {
                    levels[g][r].scale = stored;
                }
            }
        }
        levels
    }

    /// Values of the codes under new levels.
    pub(super) fn values(&self, codes: &[[u8; LANES]], levels: &[[Level; LANES]]) -> Vec<Lane> {
        codes
            .iter()
            .enumerate()
            .map(|(j, column)| {
                let level = &levels[self.group_of(j)];
                std::array::from_fn(|r| f64::from(level[r].value(column[r])))
            })
            .collect()
    }
}
