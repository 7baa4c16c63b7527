//! Coordinate descent: one code at a time is changed to the best one given all others, until none gains.
//!
//! For a code of column `j` the loss is a parabola in its value, lowest at `q_j - G_j / S_jj` with `G = (W^ - W) S`; the
//! best code is the nearest to that. `G` is kept up to date with one row of `S` per change. As a layer-wise quantizer it
//! is found in K. Behdin et al., *QuantEase* (2023, arXiv:2309.01885).

use crate::coordinate::{Problem, Solution};
use crate::lanes::{add_product, add_products, Lane, LANES};

/// Columns whose changes are held back from all other columns until they have all been made.
const COLUMNS: usize = 64;

impl Problem<'_> {
    /// `(W^ - W) S`, and the loss of every lane.
    pub(crate) fn gradient(&self, w: &[Lane], values: &[Lane]) -> (Vec<Lane>, Lane) {
        let errors: Vec<Lane> = values.iter().zip(w).map(|(a, b)| difference(a, b)).collect();
        let gradient = self.image(0, &errors);
        let mut loss = [0.0; LANES];
        for (error, gradient) in errors.iter().zip(&gradient) {
            for r in 0..LANES {
                loss[r] += error[r] * gradient[r];
            }
        }
        (gradient, loss)
    }

    /// Changes one code at a time to the best one given all others, at most `sweeps` times round, from a solution with
    /// its gradient; returns the moves.
    pub(crate) fn descend(&self, solution: &mut Solution, mut gradient: Vec<Lane>, sweeps: usize) -> u64 {
        let mut moves = 0;
        for _ in 0..sweeps {
            let before = moves;
            for first in (0..self.dim).step_by(COLUMNS) {
                moves += self.descend_block(solution, &mut gradient, first);
            }
            if moves == before {
                break;
            }
        }
        moves
    }

    /// One round over the columns from `first` on: their own gradients follow every change at once, those of all others
    /// follow the changes of the block together, in the same order and so to the same bits.
    fn descend_block(&self, solution: &mut Solution, gradient: &mut [Lane], first: usize) -> u64 {
        let end = self.dim.min(first + COLUMNS);
        let (mut changed, mut deltas, mut moves) = (Vec::new(), Vec::new(), 0);
        for j in first..end {
            let (delta, moved) = self.best_move(solution, &gradient[j], j);
            if moved > 0 {
                moves += moved;
                let row = self.s_row(j);
                add_product(self.isa, &mut gradient[first..end], &row[first..end], &delta);
                changed.push(row);
                deltas.push(delta);
            }
        }
        let before: Vec<&[f64]> = changed.iter().map(|row| &row[..first]).collect();
        add_products(self.isa, &mut gradient[..first], &before, &deltas);
        let after: Vec<&[f64]> = changed.iter().map(|row| &row[end..]).collect();
        add_products(self.isa, &mut gradient[end..], &after, &deltas);
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
