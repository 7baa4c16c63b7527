//! Eight rows of a weight side by side, and the two ways to choose their codes: one greedy sweep, and coordinate
//! descent to a point where no single code can be improved.
//!
//! Entries of a column lie side by side (`[column * LANES + lane]`), so that one entry of `S` serves eight rows. A lane
//! never looks at its neighbours: what a row becomes does not depend on who shares its tile.

use crate::grid::{Grid, Level};

/// Rows of a tile.
pub(crate) const LANES: usize = 8;

/// One number for each row of a tile.
pub(crate) type Lane = [f64; LANES];

/// Codes of a tile and the values they stand for.
#[derive(Clone)]
pub(crate) struct Choice {
    pub(crate) codes: Vec<[u8; LANES]>,
    pub(crate) values: Vec<Lane>,
    /// By group.
    pub(crate) levels: Vec<[Level; LANES]>,
}

/// What is the same for every tile of a layer.
pub(crate) struct Field<'a> {
    pub(crate) dim: usize,
    /// Damped Hessian, row-major, full.
    pub(crate) s: &'a [f64],
    pub(crate) order: &'a [usize],
    /// `A`, row-major, in the order of the sweep.
    pub(crate) a: &'a [f64],
    pub(crate) grid: Grid,
    pub(crate) signed: bool,
}

impl Field<'_> {
    pub(crate) fn group_of(&self, column: usize) -> usize {
        column / self.grid.group(self.dim)
    }

    pub(crate) fn s_row(&self, j: usize) -> &[f64] {
        &self.s[j * self.dim..(j + 1) * self.dim]
    }

    /// Rounds the columns in the field's order, each error spread over the columns still to come.
    pub(crate) fn sweep(&self, w: &[Lane], levels: Vec<[Level; LANES]>) -> Choice {
        let dim = self.dim;
        let mut updated: Vec<Lane> = self.order.iter().map(|&j| w[j]).collect();
        let mut choice = Choice { codes: vec![[0; LANES]; dim], values: vec![[0.0; LANES]; dim], levels };
        for (i, &j) in self.order.iter().enumerate() {
            let level = &choice.levels[self.group_of(j)];
            let mut error = [0.0; LANES];
            for r in 0..LANES {
                let code = level[r].code(updated[i][r], self.grid.top());
                choice.codes[j][r] = code;
                choice.values[j][r] = f64::from(level[r].value(code));
                error[r] = w[j][r] - choice.values[j][r];
            }
            let later = &self.a[i * dim + i + 1..(i + 1) * dim];
            add_product(&mut updated[i + 1..], later, &error);
        }
        choice
    }

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
    pub(crate) fn descend(&self, w: &[Lane], choice: &mut Choice, sweeps: usize) -> u64 {
        if sweeps == 0 {
            return 0;
        }
        let (mut gradient, _) = self.gradient(w, &choice.values);
        let mut moves = 0;
        for _ in 0..sweeps {
            let before = moves;
            for j in 0..self.dim {
                let (delta, moved) = self.best_move(choice, &gradient[j], j);
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

    fn best_move(&self, choice: &mut Choice, gradient: &Lane, j: usize) -> (Lane, u64) {
        let level = &choice.levels[self.group_of(j)];
        let energy = self.s[j * self.dim + j];
        let (mut delta, mut moved) = ([0.0; LANES], 0);
        for r in 0..LANES {
            let old = choice.values[j][r];
            let code = level[r].code(old - gradient[r] / energy, self.grid.top());
            if code == choice.codes[j][r] {
                continue;
            }
            let step = f64::from(level[r].value(code)) - old;
            // At a tie rounding error may call the same place better; only a real gain ends the search for sure.
            if step * (2.0 * gradient[r] + step * energy) < 0.0 {
                choice.codes[j][r] = code;
                choice.values[j][r] = old + step;
                delta[r] = step;
                moved += 1;
            }
        }
        (delta, moved)
    }

    /// Values of the codes under new levels.
    pub(crate) fn values(&self, codes: &[[u8; LANES]], levels: &[[Level; LANES]]) -> Vec<Lane> {
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

fn difference(a: &Lane, b: &Lane) -> Lane {
    std::array::from_fn(|r| a[r] - b[r])
}

/// `to[k] += row[k] * by` for all lanes.
#[inline]
pub(crate) fn add_product(to: &mut [Lane], row: &[f64], by: &Lane) {
    for (lanes, &s) in to.iter_mut().zip(row) {
        for r in 0..LANES {
            lanes[r] += s * by[r];
        }
    }
}
