//! Coordinate descent: one code at a time is changed to the best one given all others, until none gains.
//!
//! For a code of column `j` the loss is a parabola in its value, lowest at `q_j - G_j / S_jj` with `G = (W^ - W) S`; the
//! best code is the nearest to that. `G` is kept up to date with one row of `S` per change. As a layer-wise quantizer it
//! is found in K. Behdin et al., *QuantEase* (2023, arXiv:2309.01885).

use crate::coordinate::{Problem, Solution};
use crate::lanes::{add_product, Lane, LANES};

impl Problem<'_> {
    /// `(W^ - W) S`, and the loss of every lane.
    pub(crate) fn gradient(&self, w: &[Lane], values: &[Lane]) -> (Vec<Lane>, Lane) {
        let mut gradient = vec![[0.0; LANES]; self.dim];
        for j in 0..self.dim {
            let error = difference(&values[j], &w[j]);
            add_product(&mut gradient, self.s_row(j), &error);
        }
        let mut loss = [0.0; LANES];
        for j in 0..self.dim {
            let error = difference(&values[j], &w[j]);
            for r in 0..LANES {
                loss[r] += error[r] * gradient[j][r];
            }
        }
        (gradient, loss)
    }

    /// Changes one code at a time to the best one given all others, at most `sweeps` times round; returns the moves.
    pub(crate) fn descend(&self, w: &[Lane], solution: &mut Solution, sweeps: usize) -> u64 {
        if sweeps == 0 {
            return 0;
        }
        let (mut gradient, _) = self.gradient(w, &solution.values);
        let mut moves = 0;
        for _ in 0..sweeps {
            let before = moves;
            for j in 0..self.dim {
                let (delta, moved) = self.best_move(solution, &gradient[j], j);
                if moved > 0 {
                    moves += moved;
                    add_product(&mut gradient, self.s_row(j), &delta);
                }
            }
            if moves == before {
                break;
            }
        }
        moves
    }

    fn best_move(&self, solution: &mut Solution, gradient: &Lane, j: usize) -> (Lane, u64) {
        let level = &solution.levels[self.group_of(j)];
        let energy = self.s[j * self.dim + j];
        let (mut delta, mut moved) = ([0.0; LANES], 0);
        for r in 0..LANES {
            let old = solution.values[j][r];
            let code = level[r].code(old - gradient[r] / energy, self.grid.top());
            if code == solution.codes[j][r] {
                continue;
            }
            let step = f64::from(level[r].value(code)) - old;
            // At a tie rounding error may call the same place better; only a real gain ends the search for sure.
            if step * (2.0 * gradient[r] + step * energy) < 0.0 {
                solution.codes[j][r] = code;
                solution.values[j][r] = old + step;
                delta[r] = step;
                moved += 1;
            }
        }
        (delta, moved)
    }
}

fn difference(a: &Lane, b: &Lane) -> Lane {
    std::array::from_fn(|r| a[r] - b[r])
}
