//! Scales of least loss for codes that stay: with `b_g` the code steps of group `g`, `W^ = sum_g s_g b_g`, and
//! `s = (B S B^T)^-1 B S w` for each row.

use crate::grid::Level;
use crate::solve::descent::{add_product, Choice, Field, Lane, LANES};

impl Field<'_> {
    /// Levels with refitted scales. A group without a step, or whose best scale cannot be stored, keeps its own.
    pub(crate) fn refit(&self, w: &[Lane], choice: &Choice) -> Vec<[Level; LANES]> {
        let (dim, n) = (self.dim, choice.levels.len());
        let steps: Vec<Lane> = (0..dim)
            .map(|j| {
                let level = &choice.levels[self.group_of(j)];
                std::array::from_fn(|r| f64::from(choice.codes[j][r]) - f64::from(level[r].zero))
            })
            .collect();
        let mut normal = vec![[0.0; LANES]; n * n];
        let mut right = vec![[0.0; LANES]; n];
        let group = self.grid.group(dim);
        let mut product = vec![[0.0; LANES]; dim];
        for g in 0..n {
            product.fill([0.0; LANES]);
            for j in g * group..dim.min((g + 1) * group) {
                add_product(&mut product, &self.s[j * dim..(j + 1) * dim], &steps[j]);
            }
            for (k, lanes) in product.iter().enumerate() {
                let to = self.group_of(k);
                for r in 0..LANES {
                    normal[g * n + to][r] += lanes[r] * steps[k][r];
                    right[g][r] += lanes[r] * w[k][r];
                }
            }
        }
        let mut levels = choice.levels.clone();
        for r in 0..LANES {
            let live: Vec<usize> = (0..n).filter(|&g| normal[g * n + g][r] > 0.0).collect();
            let matrix = |a: usize, b: usize| normal[live[a] * n + live[b]][r];
            let Some(found) = solve(live.len(), matrix, |a| right[live[a]][r]) else {
                continue;
            };
            for (&g, scale) in live.iter().zip(found) {
                let stored = self.grid.scale_type.round(scale);
                let fits = stored.is_finite() && stored != 0.0 && (self.signed || stored > 0.0);
                if fits {
                    levels[g][r].scale = stored;
                }
            }
        }
        levels
    }
}

/// Solves a small positive definite system by Cholesky; `None` where it is not positive definite in double precision.
fn solve(n: usize, matrix: impl Fn(usize, usize) -> f64, right: impl Fn(usize) -> f64) -> Option<Vec<f64>> {
    let mut l = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let mut sum = matrix(i, j);
            for k in 0..j {
                sum -= l[i * n + k] * l[j * n + k];
            }
            if i == j {
                // Written so that NaN fails too.
                if !(sum > 0.0) {
                    return None;
                }
                l[i * n + i] = sum.sqrt();
            } else {
                l[i * n + j] = sum / l[j * n + j];
            }
        }
    }
    let mut x: Vec<f64> = (0..n).map(right).collect();
    for i in 0..n {
        for k in 0..i {
            x[i] -= l[i * n + k] * x[k];
        }
        x[i] /= l[i * n + i];
    }
    for i in (0..n).rev() {
        for k in i + 1..n {
            x[i] -= l[k * n + i] * x[k];
        }
        x[i] /= l[i * n + i];
    }
    Some(x)
}
